"""Pods of processes: hosts with roles behind `pagoda route`, and behind a proxy; killed, and cut off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from network_hosts import missing_for_namespaces, two_hosts
from pod_processes import (
    Crowd,
    PodProcesses,
    Standing,
    ask_both,
    ask_decode,
    ask_prefill,
    load_of,
    standing_pod,
    until_free,
    until_hosts,
)
from streams import HELD_OUT, Disturb, stream_all, until_more

CUT_S = 5


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    with standing_pod(tmp_path_factory.mktemp("pod")) as standing:
        yield standing


def long_questions(count: int) -> list[dict[str, Any]]:
    """Questions of some hundred tokens."""
    questions = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    return [question for question in questions if question["skill"] == "recall_40"][:count]


def bodies(count: int, max_tokens: int = 40, **fields: Any) -> list[dict[str, Any]]:
    """Requests, half of them greedy, half sampled, each with a seed of its own."""
    return [
        {
            "messages": question["messages"],
            "temperature": [0, 1.0][index % 2],
            "seed": index,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            **fields,
        }
        for index, question in enumerate(long_questions(count))
    ]


def plain(answer: Any) -> Any:
    """An answer, or events, without what is drawn for each or tells what was cached."""
    if isinstance(answer, list):
        return [plain(event) for event in answer]
    kept = {k: v for k, v in answer.items() if k not in ("id", "created", "kv_transfer_params")}
    if kept.get("usage"):
        kept["usage"] = {k: v for k, v in kept["usage"].items() if k != "prompt_tokens_details"}
    return kept


PROMPT = " ".join(message["content"] for message in long_questions(1)[0]["messages"])
COMPLETION = {"prompt": PROMPT, "max_tokens": 24, "seed": 7, "return_token_ids": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {**COMPLETION, "temperature": 0}),
    "sampled": ("/v1/completions", {**COMPLETION, "temperature": 1.3}),
    "logprobs": ("/v1/completions", {**COMPLETION, "logprobs": 3, "temperature": 1.0}),
    "penalties": (
        "/v1/completions",
        {**COMPLETION, "repetition_penalty": 1.3, "presence_penalty": 1.0, "temperature": 0},
    ),
    "stop": ("/v1/completions", {**COMPLETION, "stop": ["e", "a"], "temperature": 0}),
    "min_tokens": (
        "/v1/completions",
        {**COMPLETION, "stop": ["e", "a"], "min_tokens": 9, "temperature": 0.9},
    ),
    "one token": ("/v1/completions", {**COMPLETION, "max_tokens": 1, "temperature": 0}),
    "echo": ("/v1/completions", {**COMPLETION, "echo": True, "temperature": 0}),
    "stream": ("/v1/completions", {**COMPLETION, "stream": True, "temperature": 1.0}),
    "chat": ("/v1/chat/completions", {**bodies(1)[0], "logprobs": True, "top_logprobs": 2}),
    "chat to the end": (
        "/v1/chat/completions",
        {**bodies(1)[0], "max_tokens": None, "ignore_eos": False},
    ),
    "chat stream": (
        "/v1/chat/completions",
        {**bodies(2)[1], "stream": True, "stream_options": {"include_usage": True}},
    ),
}


ENDS_AT_ONCE = ("stop", "one token")
"""Cases whose answer ends with the first token, so that no host needs the KV any more."""


@pytest.mark.parametrize("case", CASES)
async def test_a_proxy_gets_what_one_host_answers(standing: Standing, case: str) -> None:
    path, body = CASES[case]
    async with aiohttp.ClientSession() as session:
        expected = await ask_decode(session, standing.decode, path, {**body, "cache_salt": "one"})
        before = await fetched(standing.decode)
        salted = {**body, "cache_salt": f"both, {case}"}
        answer = await ask_both(session, standing.prefill, standing.decode, path, salted)
        routed = await ask_decode(
            session, standing.router, path, {**body, "cache_salt": f"routed, {case}"}
        )
    assert plain(answer) == plain(expected)
    assert plain(routed) == plain(expected)
    if case not in ENDS_AT_ONCE:
        assert await fetched(standing.decode) >= before + 2 * 20
    await until_free([standing.prefill, standing.decode], 1)


async def test_the_first_token_is_that_of_prefill(standing: Standing) -> None:
    """Whatever decode would have sampled: here it is asked with another seed, and another is likely."""
    path = "/v1/completions"
    differs = False
    async with aiohttp.ClientSession() as session:
        for seed in range(8):
            body = {**COMPLETION, "temperature": 5.0, "seed": seed, "cache_salt": f"first {seed}"}
            first = await ask_prefill(session, standing.prefill, path, body)
            params = first["kv_transfer_params"]
            other = {**body, "seed": seed + 100}
            whole = await ask_decode(
                session, standing.decode, path, {**other, "kv_transfer_params": params}
            )
            alone = await ask_decode(session, standing.decode, path, {**other, "cache_salt": "x"})
            [head] = first["choices"][0]["token_ids"]
            assert whole["choices"][0]["token_ids"][0] == head
            differs |= alone["choices"][0]["token_ids"][0] != head
    assert differs


@pytest.mark.parametrize("stream", [False, True])
async def test_several_answers_to_one_prompt(standing: Standing, stream: bool) -> None:
    body = {**COMPLETION, "n": 3, "temperature": 1.0, "stream": stream, "best_of": 3}
    async with aiohttp.ClientSession() as session:
        answers = [
            await ask_decode(session, url, "/v1/completions", {**body, "cache_salt": salt})
            for url, salt in [(standing.decode, "n one"), (standing.router, f"n {stream}")]
        ]
    tokens = [token_ids_of(answer) for answer in answers]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 3
    await until_free([standing.prefill, standing.decode], 1)


def token_ids_of(answer: Any) -> dict[int, list[int]]:
    by_index: dict[int, list[int]] = {}
    for event in answer if isinstance(answer, list) else [answer]:
        for choice in event["choices"]:
            by_index.setdefault(choice["index"], []).extend(choice["token_ids"])
    return by_index


async def test_kv_goes_from_host_to_host(standing: Standing) -> None:
    before = await fetched(standing.decode)
    await stream_all(
        standing.router, [{**body, "stream": True, "cache_salt": "goes"} for body in bodies(4)]
    )
    assert await fetched(standing.decode) >= before + 4 * 20
    await until_free([standing.prefill, standing.decode], 1)


async def fetched(url: str) -> int:
    """Blocks that came from other hosts, so far."""
    return int((await load_of(url))["tiers"][-1]["num_loaded"])


# ---- deaths


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    with ExitStack() as stack:
        pod = PodProcesses(tmp_path_factory.mktemp("crowd"), stack)
        yield Crowd(pod, {"prefill": 2, "decode": 2})


@pytest.mark.parametrize(
    ("role", "num_events"), [("prefill", 0), ("prefill", 200), ("decode", 1), ("decode", 200)]
)
def test_a_host_is_killed(crowd: Crowd, role: str, num_events: int) -> None:
    """Some prompts have their KV before them, on its way or behind them whenever a host is killed."""
    asked = [{**body, "stream": True} for body in bodies(24, 60)]
    crowd.fill()

    async def ask() -> None:
        await crowd.until_all_joined()
        alone = [{**body, "cache_salt": "alone"} for body in asked]
        expected = await stream_all(crowd.hosts["decode"][1].base_url, alone)

        async def kill(received: Callable[[], int]) -> None:
            await until_more(received, num_events)
            crowd.kill(role)

        salted = [{**body, "cache_salt": f"{role} {num_events}"} for body in asked]
        assert await stream_all(crowd.router.base_url, salted, kill) == expected
        await until_free(crowd.urls)
        await crowd.until_all_joined()

    asyncio.run(ask())


def test_a_router_is_killed_and_started_again(crowd: Crowd) -> None:
    crowd.fill()

    async def ask(salt: str, kill: Disturb | None = None) -> list[tuple[str, str]]:
        await crowd.until_all_joined()
        asked = [{**body, "stream": True, "cache_salt": salt} for body in bodies(8, 200)]
        return await stream_all(crowd.router.base_url, asked, kill)

    async def kill(received: Callable[[], int]) -> None:
        await until_more(received, 20)
        crowd.kill_router()
        raise ConnectionError

    expected = asyncio.run(ask("before"))
    with pytest.raises(ConnectionError):
        asyncio.run(ask("broken off", kill))
    asyncio.run(until_free(crowd.urls))
    crowd.restart_router()
    assert asyncio.run(ask("after")) == expected


@pytest.mark.skipif(missing_for_namespaces() is not None, reason=str(missing_for_namespaces()))
def test_the_line_between_prefill_and_decode_is_cut_for_five_seconds(tmp_path: Path) -> None:
    asked = [{**body, "stream": True} for body in bodies(12, 60)]
    with (
        two_hosts(delay_s=0.002, loss=0.0) as (here, there, cable),
        ExitStack() as stack,
        here.entered(),
    ):
        pod = PodProcesses(tmp_path, stack, here.address)
        decode = pod.host("decode", advertise=here.address)
        with there.entered():
            prefill = pod.host("prefill", advertise=there.address)
        router = pod.route()

        async def mend(due: asyncio.Event) -> None:
            await due.wait()
            cable.mend()

        async def ask() -> None:
            await until_hosts(router.base_url, 2)
            alone = [{**body, "cache_salt": "alone"} for body in asked]
            expected = await stream_all(decode.base_url, alone)
            before = await fetched(decode.base_url)

            async def cut(received: Callable[[], int]) -> None:
                del received
                while await fetched(decode.base_url) == before:
                    await asyncio.sleep(0.001)
                cable.cut()
                asyncio.get_running_loop().call_later(CUT_S, mended.set)

            mended = asyncio.Event()
            mending = asyncio.create_task(mend(mended))
            assert await stream_all(router.base_url, asked, cut) == expected
            await mending
            await until_free([decode.base_url])
            await until_hosts(router.base_url, 2)
            before = await fetched(decode.base_url)
            again = [{**body, "cache_salt": "again"} for body in asked]
            assert await stream_all(router.base_url, again) == expected
            assert await fetched(decode.base_url) > before

        asyncio.run(ask())
        with there.entered():
            asyncio.run(until_free([prefill.base_url]))
