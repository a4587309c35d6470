# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from pagoda.errors import ConfigError
from pagoda.plugins.simulate.topology import read_topology

GOOD = """\
model: llama-3.1-8b
root: world
routers:
  world: {level: global, children: {eu: 2}}
  eu: {level: region, children: {h100: 3}}
hosts:
  h100: {device: h100}
"""


def _read(tmp_path: Path, text: str):
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    return read_topology(path)


def test_instances_have_paths(tmp_path: Path) -> None:
    topology = _read(tmp_path, GOOD)
    paths = [path for path, _ in topology.instances()]
    assert paths[:3] == ["world", "world/eu.0", "world/eu.0/h100.0"]
    assert [kind for _, kind in topology.instances()].count("h100") == 6
    prices = [topology.prices.get(kind, 0.0) for _, kind in topology.instances()]
    assert sum(prices) == pytest.approx(6 * 2.6)


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (
            ("{h100: 3}", "{h100: 3, world: 1}"),
            5,
            "world would contain itself (world → eu → world)",
        ),
        (("device: h100", "device: h101"), 7, "h101 is none of"),
        (("{h100: 3}", "{h200: 3}"), 5, "h200 is none of hosts and routers"),
        (("{h100: 3}", "{h100: -3}"), 5, "routers.eu.children: Expected `int` >= 1"),
        (("device: h100", "device: h100, max_num_seqs: 0"), 7, "hosts.h100.max_num_seqs"),
        (("device: h100", "device: h100, speed: 3"), 7, "unknown field `speed`"),
        (("root: world", "root: moon"), 2, "root is to name one of routers"),
        (("model: llama-3.1-8b", "model: llama-9"), 1, "llama-9 is no preset"),
        (("  eu: {", "  eu: [{"), 6, "expected"),
        (("root: world", "root: world\nroot: eu"), 3, "'root' is there twice"),
        (("hosts:", "faults: [{what: h100, every_s: -1}]\nhosts:"), 6, "Expected `float` >= 1"),
        (("hosts:", "hosts:\n  spare: {device: h100}"), 7, "spare is not behind the root"),
        (("device: h100", "device: h100, start_s: .inf"), 7, "<= 1"),
        (("hosts:", "faults: [{what: h100}]\nhosts:"), 6, "either every_s or at_s"),
        (("hosts:", "faults: [{what: rack, at_s: 1}]\nhosts:"), 6, "rack is none of"),
        (("hosts:", "faults: [{what: world, at_s: 1}]\nhosts:"), 6, "world is the root"),
        (("hosts:", "faults: [{what: h100, kind: cut, at_s: 1}]\nhosts:"), 6, "cut is for routers"),
        (("device: h100", "device: h100, role: prefill"), 5, "prefill hosts alone"),
        (("device: h100", "device: rtx-4090, block_size: 131072"), 7, "leave no room"),
    ],
)
def test_mistakes_are_named_with_their_lines(
    tmp_path: Path, change: tuple[str, str], line: int, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _read(tmp_path, GOOD.replace(*change, 1))
    assert f"fleet.yaml, line {line}: " in str(caught.value)
    assert words in str(caught.value)


def test_routers_may_be_shared_by_many_but_stand_in_few_levels(tmp_path: Path) -> None:
    """Two kinds at each level, behind both of the level above: twice as many ways at each."""

    def tower(levels: int) -> str:
        routers = "".join(
            f"  {kind}{n}: {{children: {{a{n + 1}: 1, b{n + 1}: 1}}}}\n"
            for n in range(levels)
            for kind in "ab"[: n + 1]
        )
        ends = "".join(f"  {kind}{levels}: {{device: h100}}\n" for kind in "ab")
        return f"model: llama-3.1-8b\nroot: a0\nrouters:\n{routers}hosts:\n{ends}"

    with pytest.raises(ConfigError, match="routers stand in more than 16 levels"):
        _read(tmp_path, tower(40))
    assert sum(1 for _ in _read(tmp_path, tower(6)).instances()) == 2**7 - 1
