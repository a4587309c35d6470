"""Handoffs between a proxy, a prefill server and a decode server, where other systems went wrong.

All tests share the processes, and none of them harms another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from pod_processes import (
    LEASE_S,
    Standing,
    ask_decode,
    ask_prefill,
    load_of,
    standing_pod,
    until_free,
)

PATH = "/v1/completions"
PROMPT = "One sentence, again and again. " * 20
BODY = {"prompt": PROMPT, "max_tokens": 12, "seed": 3, "temperature": 1.0, "return_token_ids": True}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    with standing_pod(tmp_path_factory.mktemp("pod")) as standing:
        yield standing


@pytest.fixture
async def session(servers: Standing) -> AsyncIterator[aiohttp.ClientSession]:
    """A session. After every test, nothing is held on either side for longer than a lease."""
    async with aiohttp.ClientSession() as session:
        yield session
    await until_free(servers[:2])


_numbers = iter(range(1000))


def salted(**fields: Any) -> dict[str, Any]:
    """A body whose prompt nobody has cached."""
    return {**BODY, "cache_salt": f"lesson {next(_numbers)}", **fields}


def tokens_of(answer: Any) -> list[int]:
    [choice] = answer["choices"]
    ids: list[int] = choice["token_ids"]
    return ids


async def alone(session: aiohttp.ClientSession, servers: Standing, **fields: Any) -> list[int]:
    """The answer of one host."""
    return tokens_of(await ask_decode(session, servers.decode, PATH, salted(**fields)))


async def params_of(
    session: aiohttp.ClientSession, servers: Standing, body: dict[str, Any]
) -> dict[str, Any]:
    answer = await ask_prefill(session, servers.prefill, PATH, body)
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


async def test_a_length_of_null_is_nothing_to_count_down(
    session: aiohttp.ClientSession, servers: Standing
) -> None:
    """ATOM #253: `max_tokens -= 1` for the token that prefill had sampled."""
    body = salted(max_tokens=None)
    params = await params_of(session, servers, body)
    whole = await ask_decode(session, servers.decode, PATH, {**body, "kv_transfer_params": params})
    assert tokens_of(whole) == await alone(session, servers, max_tokens=None)
    assert whole["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("name", ["prefill", "decode", "router"])
async def test_a_stream_is_an_event_stream_and_an_answer_is_json(
    session: aiohttp.ClientSession, servers: Standing, name: str
) -> None:
    """ATOM #253: the content type of a stream was that of JSON."""
    url = getattr(servers, name)
    for stream, kind in ((True, "text/event-stream"), (False, "application/json")):
        async with session.post(url + PATH, json=salted(stream=stream)) as response:
            assert response.content_type == kind
            await response.read()


async def test_a_prompt_that_prefill_refuses_is_refused_everywhere(
    session: aiohttp.ClientSession, servers: Standing
) -> None:
    """sglang#30233: prefill refused a prompt that was too long, and decode made something up."""
    source = {"remote_engine_id": "e", "remote_host": "127.0.0.1", "remote_port": 1}
    asked = {
        servers.prefill: {"do_remote_decode": True},
        servers.decode: {"do_remote_prefill": True, "transfer_id": "t", **source},
        servers.router: None,
    }
    for url, params in asked.items():
        body = {**BODY, "prompt": [5] * 2048, "kv_transfer_params": params}
        async with session.post(url + PATH, json=body) as response:
            assert response.status == 400
            assert "2048 tokens" in (await response.json())["error"]["message"]


async def test_what_cannot_be_fetched_is_computed(
    session: aiohttp.ClientSession, servers: Standing
) -> None:
    """vllm#52234: an answer of HTTP 200 with wrong tokens; vllm#26171: decode waited for ever."""
    for wrong in (
        {"remote_engine_id": "another"},
        {"transfer_id": "another"},
        {"remote_port": 1},
        {"remote_host": "127.0.0.2"},
        {"remote_host": "nobody.invalid"},
        {"remote_port": int(servers.prefill.rpartition(":")[2])},
    ):
        body = salted()
        params = await params_of(session, servers, body)
        body["kv_transfer_params"] = {**params, **wrong}
        async with asyncio.timeout(30):
            whole = await ask_decode(session, servers.decode, PATH, body)
        assert tokens_of(whole) == await alone(session, servers), wrong


async def test_decode_refuses_and_prefill_lets_go(
    session: aiohttp.ClientSession, servers: Standing
) -> None:
    """vllm#41269: decode refused a request before it had taken it, and prefill held its blocks for ever."""
    body = salted()
    params = await params_of(session, servers, body)
    assert (await load_of(servers.prefill))["num_leases"] == 1
    bad = {**body, "temperature": -1, "kv_transfer_params": params}
    async with session.post(servers.decode + PATH, json=bad) as response:
        assert response.status == 400
    await until_free([servers.prefill])
    assert (await load_of(servers.prefill))["num_leases_expired"] > 0


@pytest.mark.parametrize("num_events", [0, 1])
async def test_the_client_leaves_and_both_let_go(
    session: aiohttp.ClientSession, servers: Standing, num_events: int
) -> None:
    """vllm#46283: decode aborted, and prefill held its blocks for ever. Here it is told before the lease ends."""
    body = salted(stream=True, max_tokens=500, ignore_eos=True)
    params = await params_of(session, servers, body)
    full = {**body, "kv_transfer_params": params}
    async with session.post(servers.decode + PATH, json=full) as response:
        for _ in range(num_events):
            await response.content.readline()
    await until_free(servers[:2], LEASE_S / 2 if num_events else LEASE_S + 2)


async def test_the_same_parameters_again_and_twice_at_once(
    session: aiohttp.ClientSession, servers: Standing
) -> None:
    """vllm#46240: what was done twice ended the engine."""
    body = salted()
    params = await params_of(session, servers, body)
    full = {**body, "kv_transfer_params": params}
    both = await asyncio.gather(
        *(ask_decode(session, servers.decode, PATH, full) for _ in range(2))
    )
    again = await ask_decode(session, servers.decode, PATH, full)
    expected = await alone(session, servers)
    assert [tokens_of(answer) for answer in (*both, again)] == [expected] * 3


async def test_ids_of_requests_are_the_clients_own_matter(
    session: aiohttp.ClientSession, servers: Standing
) -> None:
    """ATOM #253: an id was text on one side and a number on the other, so what was done never matched."""
    body = salted()
    headers = {"X-Request-Id": "7"}

    async def ask() -> list[int]:
        params = {"do_remote_decode": True}
        one = {**body, "max_tokens": 1, "kv_transfer_params": params}
        async with session.post(servers.prefill + PATH, json=one, headers=headers) as response:
            params = (await response.json())["kv_transfer_params"]
        full = {**body, "kv_transfer_params": params}
        async with session.post(servers.decode + PATH, json=full, headers=headers) as response:
            return tokens_of(await response.json())

    assert await asyncio.gather(ask(), ask(), ask()) == [await alone(session, servers)] * 3


async def test_a_router_arranges_handoffs_itself(
    session: aiohttp.ClientSession, servers: Standing
) -> None:
    """The router's clients are end users, who must not say where KV comes from."""
    body = {**salted(), "kv_transfer_params": {"do_remote_decode": True}}
    async with session.post(servers.router + PATH, json=body) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["param"] == "kv_transfer_params.do_remote_decode"
    assert "a router" in error["message"]
