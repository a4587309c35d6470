# SPDX-License-Identifier: Apache-2.0
"""Steps become calls that the device takes: any shares of any sequences, and the rows of them that are wanted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagoda.plugins.backend_check.subject import batch_of_spans
from pagoda.plugins.pypto.contract import Contract, read_manifest
from pagoda.plugins.pypto.steps import CallBuffers, plan_step

PAGES = 40


@pytest.fixture(scope="module")
def contract() -> Contract:
    from pagoda_pypto_device.contracts import manifest

    (found,) = read_manifest(manifest(("qwen3-small",), 1)).contracts
    return found


@pytest.fixture(scope="module")
def buffers(contract: Contract) -> CallBuffers:
    return CallBuffers(contract)


@pytest.fixture(autouse=True, scope="module")
def _installed() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        from pathlib import Path

        patch.syspath_prepend(Path(__file__).parents[4] / "tests" / "pypto_device")
        yield


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int, list[int]]]:
    """Shares (computed before, computed now, pages) of up to 16 sequences; single tokens alone now and then."""
    pages = list(draw(st.permutations(range(PAGES))))
    single = draw(st.booleans())
    found = []
    for _ in range(draw(st.integers(1, 16))):
        done = draw(st.integers(0, 290))
        count = 1 if single else draw(st.integers(1, 60))
        needed = -(-(done + count) // 128)
        if needed > len(pages):
            break
        found.append((done, count, [pages.pop() for _ in range(needed)]))
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps())
def test_calls_are_within_the_contract(
    contract: Contract, buffers: CallBuffers, spans: list[tuple[int, int, list[int]]]
) -> None:
    batch = batch_of_spans(spans)
    token_ids = torch.arange(len(batch.positions)) * 37 % contract.sizes["REAL_V"]
    places = plan_step(batch, 0, 128)
    sizes = buffers.write(token_ids, places, warm_up=False)
    tokens = taken(contract, buffers, places.program, sizes)
    assert tokens.ids.tolist() == token_ids.tolist()
    assert tokens.context_lens.tolist() == batch.context_lens.tolist()
    assert tokens.query_lens.tolist() == batch.query_lens.tolist()
    for table, (_, _, pages) in zip(tokens.tables, spans, strict=True):
        assert table[: len(pages)].tolist() == pages
    fresh = {
        pages[at // 128] for done, n, pages in spans for at in range(done, done + n) if not at % 128
    }
    assert set(places.fresh) == fresh
    assert places.program == ("decode" if all(n == 1 for _, n, _ in spans) else "prefill")


def taken(contract: Contract, buffers: CallBuffers, program: Any, sizes: dict[str, int]) -> Any:
    """The tokens of a call as the device understands them."""
    from pagoda_pypto_device.checks import decode_tokens, prefill_tokens

    meanings = [arg.meaning for arg in contract.programs[program].args]
    held = {
        meaning: buffers.host(program, meaning, sizes)
        for meaning in meanings
        if meaning
        in ("tokens", "seq_lens", "chunk_lens", "chunk_offsets", "block_table", "slot_mapping")
    }
    arguments: Any = SimpleNamespace(sizes=sizes | {"PAGES": PAGES}, one=lambda name: held[name])
    if program == "prefill":
        return prefill_tokens(contract, arguments)
    tokens, active = decode_tokens(contract, arguments)
    assert active == len(tokens.ids)
    return tokens


def test_a_warm_up_writes_nowhere(contract: Contract, buffers: CallBuffers) -> None:
    batch = batch_of_spans([(100, 30, [0, 0]), (0, 5, [0])])
    places = plan_step(batch, 0, 128)
    sizes = buffers.write(torch.zeros(35, dtype=torch.int64), places, warm_up=True)
    assert set(taken(contract, buffers, "prefill", sizes).slots.tolist()) == {-1}


def test_rows_of_a_step_become_sequences_of_their_own(
    contract: Contract, buffers: CallBuffers
) -> None:
    batch = batch_of_spans([(100, 40, [7, 9]), (0, 5, [3])])
    places = plan_step(batch, 0, 128)
    sequences = torch.repeat_interleave(batch.query_lens)
    chosen = places.rows([0, 30, 41], sequences, batch.positions)
    sizes = buffers.write(torch.tensor([1, 2, 3]), chosen, warm_up=False)
    tokens = taken(contract, buffers, "decode", sizes)
    assert tokens.context_lens.tolist() == [101, 131, 2]
    assert tokens.slots.tolist() == [7 * 128 + 100, 9 * 128 + 2, 3 * 128 + 1]


def test_inactive_rows_repeat_the_first(buffers: CallBuffers) -> None:
    places = plan_step(batch_of_spans([(200, 1, [4, 5]), (7, 1, [6])]), 0, 128)
    sizes = buffers.write(torch.tensor([11, 12]), places, warm_up=False)
    lens = buffers.host("decode", "seq_lens", sizes).tolist()
    assert lens == [201, 8, *[201] * 14]
    assert buffers.host("decode", "tokens", sizes)[:, 0].tolist() == [11, 12, *[11] * 14]
    table = buffers.host("decode", "block_table", sizes).view(16, -1)
    assert table[1, :2].tolist() == [6, 0]
    assert table[15].tolist() == table[0].tolist()
