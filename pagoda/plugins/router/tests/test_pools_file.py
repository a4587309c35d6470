# SPDX-License-Identifier: Apache-2.0
"""The file of `--pools`, what is wrong with it, and which pool a host belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagoda.errors import ConfigError
from pagoda.messages.frontend import Hello, PoolModel
from pagoda.plugins.router.host_client import Identity
from pagoda.plugins.router.pools import pool_for
from pagoda.plugins.router.pools_file import read_pools

WHOLE = """\
pools:
  chat:
    model: models/chat
    aliases: [gpt-4o, gpt-4o-mini]
    adapters: {sql: adapters/sql}
    policy: power-of-two
    max_requests: 100
    least_priority: -1
    keys: [alice]
    fallback: [small]
  small: {model: models/small}
models:
  assistant: {chat: 0.95, small: 0.05}
"""


def test_a_file_says_what_goes_for_each_pool(tmp_path: Path) -> None:
    path = tmp_path / "pools.yaml"
    path.write_text(WHOLE)
    file = read_pools(path)
    chat, small = file.pools["chat"], file.pools["small"]
    assert (chat.model, chat.aliases) == ("models/chat", ("gpt-4o", "gpt-4o-mini"))
    assert (chat.policy, chat.max_requests, chat.keys) == ("power-of-two", 100, ("alice",))
    assert (small.policy, small.max_requests, small.keys) == ("prefix-affinity", None, None)
    assert file.models == {"assistant": {"chat": 0.95, "small": 0.05}}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("power-of-two", "fastest", "line 6: pools.chat.policy: Invalid enum value 'fastest'."),
        ("max_requests: 100", "max_requests: many", "line 7: pools.chat.max_requests: Expected"),
        ("max_requests: 100", "max_request: 100", "line 2: pools.chat: Object contains unknown"),
        ("[small]", "[tiny]", "line 10: pools.chat.fallback.0: 'tiny' must be another pool"),
        ("[small]", "[chat]", "line 10: pools.chat.fallback.0: 'chat' must be another pool"),
        ("gpt-4o-mini", "small", "line 4: pools.chat.aliases.1: 'small' is a pool already."),
        ("{sql:", "{gpt-4o:", "line 5: pools.chat.adapters.gpt-4o: 'gpt-4o' is an alias already."),
        ("chat: 0.95", "chat: 0", "line 13: models.assistant: Expected `float` > 0.0."),
        ("small: 0.05", "tiny: 0.05", "line 13: models.assistant.tiny: 'tiny' must be a pool"),
        ("assistant", "chat", "line 13: models.chat: 'chat' is a pool already."),
        ("  small:", "  chat:", "line 11: 'chat' is there twice."),
        ("model: models/chat", "model: &m x\n    chat_template: *m", "line 3: write values out"),
        ("aliases: [", "aliases: [[", ", line 5: this is not valid YAML (expected"),
        (WHOLE, "models: {}", "line 1: the file: Object missing required field `pools`."),
        (WHOLE, "pools: {}", "line 1: pools: Expected `object` of length >= 1."),
        (WHOLE, "", "line 1: the file: Expected `object`, got `null`."),
    ],
)
def test_what_is_wrong_is_told_by_line_and_field(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    path = tmp_path / "pools.yaml"
    path.write_text(WHOLE.replace(before, after, 1))
    with pytest.raises(ConfigError) as caught:
        read_pools(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_host_belongs_to_the_pool_that_it_names_or_that_has_its_model() -> None:
    hello = Hello(
        pools=(PoolModel("a", "m", "1"), PoolModel("b", "m", "1"), PoolModel("c", "n", "2"))
    )

    def pool_of(model: str, digest: str, pool: str = "") -> str:
        return pool_for(Identity("h", model, digest, is_router=False, pool=pool), hello).pool

    assert pool_of("m", "1") == "a"
    assert pool_of("b", "1") == "b"  # its name for the model is that of a pool
    assert pool_of("m", "1", "b") == "b"
    assert pool_of("x", "2") == "c"
    with pytest.raises(ConfigError, match="has no pool 'c' of the host's model m"):
        pool_of("m", "1", "c")
    with pytest.raises(ConfigError, match="serves m, n, and x at the host is another model"):
        pool_of("x", "3")
    plain = Hello(pools=(PoolModel("", "m", "1"),))
    named = Identity("h", "m", "1", is_router=False, pool="b")
    assert pool_for(named, plain).pool == ""  # a router of one model has no pools to name
