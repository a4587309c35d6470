# SPDX-License-Identifier: Apache-2.0
"""Handoffs between a proxy of the kind that others have, a prefill server and a decode server, and by a router.

All tests share the processes, and none of them harms another. Many are of what went wrong in other systems.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from pod_processes import (
    PodProcesses,
    fetched,
    load_of,
    long_bodies,
    until_free,
    until_hosts,
)

from pagoda.plugins.trace.merge.merging import merge_into_file
from pagoda.plugins.trace.report.reporting import report_of

PATH = "/v1/completions"


class Pod(NamedTuple):
    prefill: str
    decode: str
    router: str
    traces: Path
    """The router's directory of traces; those of hosts are others."""
    session: aiohttp.ClientSession

    async def ask(self, url: str, body: dict[str, Any], path: str = PATH, **headers: str) -> Any:
        """Returns the answer, or the events of its stream."""
        async with self.session.post(url + path, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            if not body.get("stream"):
                return await response.json()
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
            return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    async def refused(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the error."""
        async with self.session.post(url + PATH, json=body) as response:
            assert response.status == 400
            error: dict[str, Any] = (await response.json())["error"]
            return error

    async def ask_prefill(self, body: dict[str, Any], path: str = PATH, **headers: str) -> Any:
        """Returns the answer of the prefill server, as vLLM's proxies ask it."""
        nothing = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        params = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(nothing)}
        body = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": params}
        body.pop("stream_options", None)
        return await self.ask(self.prefill, body, path, **headers)

    async def prefilled(
        self, body: dict[str, Any], path: str = PATH, **headers: str
    ) -> dict[str, Any]:
        """Returns the body for the decode server of a request that the prefill server has computed."""
        answer = await self.ask_prefill(body, path, **headers)
        return {**body, "kv_transfer_params": answer["kv_transfer_params"]}

    async def hand_over(self, body: dict[str, Any], path: str = PATH, **headers: str) -> Any:
        """Returns what a client gets through the proxy."""
        return await self.ask(
            self.decode, await self.prefilled(body, path, **headers), path, **headers
        )

    async def through_atom(self, body: dict[str, Any], path: str = PATH) -> Any:
        """Returns what a client gets through ATOM's proxy, which knows each server by the address of its API and
        the port of its handshakes, and hands these on instead of the addresses in the answer."""
        handshake = {
            "remote_handshake_port": 6301,
            "remote_engine_id": None,
            "remote_block_ids": None,
        }

        def at(url: str) -> dict[str, Any]:
            host, port = url.removeprefix("http://").split(":")
            return {**handshake, "remote_host": host, "remote_port": port}

        sizes = {"remote_dp_size": 1, "remote_tp_size": 1}
        params = {**sizes, "do_remote_decode": True, "do_remote_prefill": False, **at(self.decode)}
        first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": params}
        if "max_completion_tokens" in body:
            first["max_completion_tokens"] = 1
        first.pop("stream_options", None)
        headers = {"Authorization": "Bearer None", "X-Request-Id": str(uuid.uuid4())}
        given = (await self.ask(self.prefill, first, path, **headers))["kv_transfer_params"]
        params = {"do_remote_decode": False, "do_remote_prefill": True, **at(self.prefill), **sizes}
        params["transfer_id"] = given["transfer_id"]
        params |= {name: given[name] for name in ("remote_engine_id", "remote_block_ids")}
        params |= {"remote_dp_rank": given["dp_rank"]} if "dp_rank" in given else {}
        return await self.ask(self.decode, {**body, "kv_transfer_params": params}, path, **headers)

    async def alone(self, **fields: Any) -> list[int]:
        """Returns the answer of one host."""
        return tokens_of(await self.ask(self.decode, salted(**fields)))


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str, Path]]:
    with ExitStack() as stack:
        directory = tmp_path_factory.mktemp("pod")
        pod = PodProcesses(directory, stack)
        prefill, decode = (
            pod.host(role, "--profile-dir", str(directory / role)).base_url
            for role in ("prefill", "decode")
        )
        router = pod.route("--profile-dir", str(directory / "router")).base_url
        asyncio.run(until_hosts(router, 2))
        yield prefill, decode, router, directory / "router"


@pytest.fixture
async def pod(urls: tuple[str, str, str, Path]) -> AsyncIterator[Pod]:
    """A pod of which, after every test, neither side holds anything for longer than a lease."""
    async with aiohttp.ClientSession() as session:
        yield Pod(*urls, session)
    await until_free([urls[0], urls[1]])


def plain(answer: Any) -> Any:
    """An answer, or events, without what is drawn for each or tells what was cached."""
    if isinstance(answer, list):
        return [plain(event) for event in answer]
    kept = {k: v for k, v in answer.items() if k not in ("id", "created", "kv_transfer_params")}
    if kept.get("usage"):
        kept["usage"] = {k: v for k, v in kept["usage"].items() if k != "prompt_tokens_details"}
    return kept


CHAT = long_bodies(1, 40, stream=False)[0]
PROMPT = " ".join(message["content"] for message in CHAT["messages"])
COMPLETION = {"prompt": PROMPT, "max_tokens": 24, "seed": 7, "return_token_ids": True}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.3},
    "logprobs": {"logprobs": 3, "temperature": 1.0},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 1.0, "temperature": 0},
    "stop": {"stop": ["e", "a"], "temperature": 0},
    "min_tokens": {"stop": ["e", "a"], "min_tokens": 9, "temperature": 0.9},
    "one token": {"max_tokens": 1, "temperature": 0},
    "echo": {"echo": True, "temperature": 0},
    # Drafts would come several tokens to an event, as many as paid at the time.
    "stream": {"stream": True, "temperature": 1.0, "speculation": "off"},
    "length of null": {"max_tokens": None, "temperature": 1.0},
    "three answers": {"n": 3, "best_of": 3, "temperature": 1.0},
    "chat": {"logprobs": True, "top_logprobs": 2},
    "chat to the end": {"max_tokens": None, "ignore_eos": False},
    "chat held to a schema": {
        "structured_outputs": {"json": {"type": "array", "items": {"const": 7}, "minItems": 9}},
        "ignore_eos": False,
        "temperature": 1.0,
        "seed": 3,
    },
    "chat stream": {
        "temperature": 1.0,
        "speculation": "off",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
}
"""Fields of a chat where the name says so, else of a completion."""
ENDS_AT_ONCE = ("stop", "one token")
"""Cases whose answer ends with the first token, so that no host needs the KV any more."""


_numbers = iter(range(1000))


def salted(**fields: Any) -> dict[str, Any]:
    """A body whose prompt nobody has cached."""
    return {**COMPLETION, "cache_salt": f"test {next(_numbers)}", "temperature": 1.0, **fields}


async def num_expired(pod: Pod) -> int:
    """Returns the number of leases that ended because nobody came for the KV."""
    return int((await load_of(pod.prefill))["num_leases_expired"])


def tokens_of(answer: Any) -> list[int]:
    [choice] = answer["choices"]
    ids: list[int] = choice["token_ids"]
    return ids


@pytest.mark.parametrize("case", CASES)
async def test_a_proxy_gets_what_one_host_answers(pod: Pod, case: str) -> None:
    is_chat = case.startswith("chat")
    path = "/v1/chat/completions" if is_chat else PATH
    body = (CHAT if is_chat else COMPLETION) | CASES[case]
    expected = await pod.ask(pod.decode, {**body, "cache_salt": "one"}, path)
    before, expired = await fetched(pod.decode), await num_expired(pod)
    routed = await pod.ask(pod.router, {**body, "cache_salt": f"routed, {case}"}, path)
    assert plain(routed) == plain(expected)
    if body.get("n") is None:  # a proxy hands over one sequence
        answer = await pod.hand_over({**body, "cache_salt": f"both, {case}"}, path)
        assert plain(answer) == plain(expected)
    if case not in ENDS_AT_ONCE:
        assert await fetched(pod.decode) >= before + (1 if body.get("n") else 2) * 20
    await until_free([pod.prefill, pod.decode])
    assert await num_expired(pod) == expired


@pytest.mark.parametrize("case", ["sampled", "stream", "chat", "chat stream"])
async def test_atoms_proxy_gets_what_one_host_answers(pod: Pod, case: str) -> None:
    is_chat = case.startswith("chat")
    path = "/v1/chat/completions" if is_chat else PATH
    body = (CHAT if is_chat else COMPLETION) | CASES[case]
    expected = await pod.ask(pod.decode, {**body, "cache_salt": "one"}, path)
    before, expired = await fetched(pod.decode), await num_expired(pod)
    answer = await pod.through_atom({**body, "cache_salt": f"atom, {case}"}, path)
    assert plain(answer) == plain(expected)
    assert await fetched(pod.decode) >= before + 20
    await until_free([pod.prefill, pod.decode])
    assert await num_expired(pod) == expired


async def test_an_empty_answer_stays_empty(pod: Pod) -> None:
    """Proxies of vLLM send `min_tokens: 1` to the prefill server alone, which must not change the answer."""
    ends_at_once = {"stop_token_ids": [50], "logit_bias": {"50": 100.0}, "temperature": 0}
    assert await pod.alone(**ends_at_once) == [50]
    body = salted(**ends_at_once)
    computed = await pod.prefilled({**body, "min_tokens": 1})
    before = await fetched(pod.decode)
    answer = await pod.ask(pod.decode, {**computed, "min_tokens": None})
    [choice] = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["stop_reason"]) == ("", [50], 50)
    assert await fetched(pod.decode) > before


async def test_a_stream_of_several_answers(pod: Pod) -> None:
    tokens = []
    for url in (pod.decode, pod.router):
        by_index: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for event in await pod.ask(url, salted(n=3, stream=True)):
            for choice in event["choices"]:
                by_index[choice["index"]] += choice["token_ids"]
        tokens.append(by_index)
    assert tokens[0] == tokens[1]


async def test_a_prompt_that_prefill_refuses_is_refused_everywhere(pod: Pod) -> None:
    """sglang#30233: prefill refused a prompt that was too long, and decode made something up."""
    source = {"remote_engine_id": "e", "remote_host": "127.0.0.1", "remote_port": 1}
    asked = {
        pod.prefill: {"do_remote_decode": True},
        pod.decode: {"do_remote_prefill": True, "transfer_id": "t", **source},
        pod.router: None,
    }
    for url, params in asked.items():
        body = {**COMPLETION, "prompt": [5] * 2048, "kv_transfer_params": params}
        assert "2048 tokens" in (await pod.refused(url, body))["message"]


async def test_what_cannot_be_fetched_is_computed(pod: Pod) -> None:
    """vllm#52234: an answer of HTTP 200 with wrong tokens; vllm#26171: decode waited for ever."""
    expected = await pod.alone()
    for wrong in (
        {"remote_engine_id": "another"},
        {"transfer_id": "another"},
        {"remote_port": 1},
        {"remote_host": "127.0.0.2"},
        {"remote_host": "nobody.invalid"},
        {"remote_port": int(pod.prefill.rpartition(":")[2])},
    ):
        body = await pod.prefilled(salted())
        body["kv_transfer_params"] |= wrong
        async with asyncio.timeout(30):
            assert tokens_of(await pod.ask(pod.decode, body)) == expected, wrong


async def test_decode_refuses_and_prefill_lets_go(pod: Pod) -> None:
    """vllm#41269: decode refused a request before it had taken it, and prefill held its blocks for ever."""
    body = await pod.prefilled(salted())
    assert (await load_of(pod.prefill))["num_leases"] == 1
    await pod.refused(pod.decode, {**body, "temperature": -1})
    await until_free([pod.prefill])
    assert (await load_of(pod.prefill))["num_leases_expired"] > 0


@pytest.mark.parametrize("num_events", [0, 1])
async def test_the_client_leaves_and_both_let_go(pod: Pod, num_events: int) -> None:
    """vllm#46283: decode aborted, and prefill held its blocks for ever. Here it is told before the lease ends."""
    before = await num_expired(pod)
    body = await pod.prefilled(salted(stream=True, max_tokens=500, ignore_eos=True))
    async with pod.session.post(pod.decode + PATH, json=body) as response:
        for _ in range(num_events):
            await response.content.readline()
    await until_free([pod.prefill, pod.decode])
    if num_events:  # decode had begun, so prefill was told
        assert await num_expired(pod) == before


async def test_the_same_parameters_again_and_twice_at_once(pod: Pod) -> None:
    """vllm#46240: what was done twice ended the engine."""
    body = await pod.prefilled(salted())
    both = await asyncio.gather(*(pod.ask(pod.decode, body) for _ in range(2)))
    again = await pod.ask(pod.decode, body)
    assert [tokens_of(answer) for answer in (*both, again)] == [await pod.alone()] * 3


async def test_ids_of_requests_are_the_clients_own_matter(pod: Pod) -> None:
    """ATOM #253: an id was text on one side and a number on the other, so what was done never matched."""
    body = salted()
    answers = await asyncio.gather(
        *(pod.hand_over(body, **{"X-Request-Id": "7"}) for _ in range(3))
    )
    assert list(map(tokens_of, answers)) == [await pod.alone()] * 3


async def test_a_router_arranges_handoffs_itself(pod: Pod) -> None:
    """The router's clients are end users, who must not say where KV comes from."""
    body = salted(kv_transfer_params={"do_remote_decode": True})
    error = await pod.refused(pod.router, body)
    assert error["param"] == "kv_transfer_params.do_remote_decode"
    assert "a router" in error["message"]
    async with pod.session.post(
        pod.router + PATH, json=salted(), headers={"X-data-parallel-rank": "0"}
    ) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "X-data-parallel-rank")
    assert "a router chooses the host itself" in error["message"]


@pytest.mark.parametrize("level", ["e2e", "kernel"])
async def test_a_trace_of_the_pod_from_one_command(pod: Pod, level: str) -> None:
    """The second trace takes the place of the first, with the files of all hosts."""
    async with pod.session.post(f"{pod.router}/profile/start", json={"level": level}) as response:
        assert response.status == 200
    bodies = [salted(cache_salt=f"traced {level} {number}", ignore_eos=True) for number in range(4)]
    await asyncio.gather(*(pod.ask(pod.router, body) for body in bodies))
    await until_free([pod.prefill, pod.decode])
    async with pod.session.post(f"{pod.router}/profile/stop") as response:
        assert (await response.json())["problems"] == []
    merged = merge_into_file([pod.traces])
    kinds = [process.header.kind for process in merged.trace.processes]
    assert kinds == ["router", *(["frontend", "engine", "worker"] * 2)]
    assert {process.clock for process in merged.trace.processes} <= {"main", "measured"}
    assert merged.trace.notes == ()
    assert merged.num_requests == 4
    found = report_of(merged.trace)
    assert len(found.requests) == 4
    for request in found.requests:
        assert request.output_tokens == 24
        assert request.took["prefill"] > 0
        assert request.took["decode"] > 0
        assert sum(request.took.values()) == pytest.approx(request.end_to_end)


async def test_hosts_that_do_both_hand_over_to_each_other(tmp_path: Path) -> None:
    """The router, whose policy is round-robin, sends the second request to the host without its beginning. All
    addresses are of IPv6; one host finds its own."""
    flags = "--kv-transports", "tcp"
    with ExitStack() as stack:
        processes = PodProcesses(tmp_path, stack, "::1")
        hosts = [processes.host("both", *flags, advertise=own).base_url for own in ("::1", None)]
        router = processes.route().base_url
        await until_hosts(router, 2)
        async with aiohttp.ClientSession() as session:
            pod = Pod(*hosts, router, tmp_path, session)
            async with session.get(f"{router}/v1/hosts") as response:
                known = (await response.json())["data"]
            assert all(host["address"].startswith("[::1]:") for host in known)
            answers = []
            for _ in range(4):
                answers.append(tokens_of(await pod.ask(router, COMPLETION)))
                await until_free(hosts)
        assert answers == [answers[0]] * 4
        assert sum([await fetched(url) for url in hosts]) >= 20
