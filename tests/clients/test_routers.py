# SPDX-License-Identifier: Apache-2.0
"""Routers of others before Pagoda: several turns with tools, and prefill and decode apart with KV handed over."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from conversations import ADD, ANSWER, QUESTION

from conftest import Server, free_port, get, router_command, running

ROUTERS = ["smg", "sglang_router", "vllm_router"]
_LAUNCH = {
    "smg": ("smg", "launch"),
    "sglang_router": ("sglang_router.launch_router",),
    "vllm_router": ("vllm_router.launch_router",),
}
_READY = {"smg": "readiness", "sglang_router": "readiness", "vllm_router": "readiness"}
_LOADED = re.compile(r'^pagoda_kv_tier_blocks_loaded_total\{[^}]*tier="remote"[^}]*\} (\d+)', re.M)
LONG = " ".join(f"What is {number} + {number + 7}?" for number in range(30))


def routing(name: str, *arguments: str) -> tuple[list[str], str]:
    """The command of a router and its URL."""
    port, figures = free_port(), free_port()
    own = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(figures)]
    return router_command(*_LAUNCH[name], *own, *arguments), f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module", params=ROUTERS)
def router(request: pytest.FixtureRequest, server: Server) -> Iterator[Server]:
    command, url = routing(request.param, "--worker-urls", server.url)
    with running(command, f"{url}/{_READY[request.param]}"):
        yield Server(url)


@pytest.mark.parametrize("stream", [False, True])
def test_turns_with_tools(router: Server, stream: bool) -> None:
    client = openai.OpenAI(base_url=router.v1, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(3):
        with (
            client.chat.completions.stream(
                model=router.model, messages=messages, tools=[ADD], temperature=0, max_tokens=200
            )
            if stream
            else _whole(client, router.model, messages) as answer
        ):
            if stream:
                for _ in answer:
                    pass
            message = answer.get_final_completion().choices[0].message
        messages.append(message.to_dict())
        calls = message.tool_calls or ()
        messages += [{"role": "tool", "tool_call_id": it.id, "content": ANSWER} for it in calls]
        messages.append({"role": "user", "content": QUESTION})


class _whole:  # noqa: N801 - stands where the stream helper's function does
    """An answer in one piece, by the interface of the stream helper."""

    def __init__(
        self, client: openai.OpenAI, model: str, messages: list[dict[str, object]]
    ) -> None:
        self._answer = client.chat.completions.create(
            model=model, messages=messages, tools=[ADD], temperature=0, max_tokens=200
        )

    def __enter__(self) -> _whole:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def get_final_completion(self) -> object:
        return self._answer


def test_completions_and_models(router: Server) -> None:
    client = openai.OpenAI(base_url=router.v1, api_key="none", max_retries=0)
    assert client.completions.create(model=router.model, prompt="a", max_tokens=4).choices[0].text
    assert router.model in [model.id for model in client.models.list()]


@pytest.mark.parametrize("name", ROUTERS)
def test_prefill_and_decode_apart(
    name: str, server: Server, start: Callable[..., Server], cluster_key: Path
) -> None:
    """Blocks were handed over: right answers alone would also come from a decode server that computes prompts."""
    key = ("--cluster-key-file", str(cluster_key))
    prefill = start("--role", "prefill", *key)
    decode = start("--role", "decode", "--bootstrap-hosts", "127.0.0.1", *key)
    bootstrap = [prefill.url.rpartition(":")[2]] if name == "sglang_router" else []
    mode = "--vllm-pd-disaggregation" if name == "vllm_router" else "--pd-disaggregation"
    command, url = routing(name, mode, "--prefill", prefill.url, *bootstrap, "--decode", decode.url)
    with running(command, f"{url}/{_READY[name]}"):
        through = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        alone = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
        for turn in range(3):
            messages = [{"role": "user", "content": f"{turn}. {LONG}"}]
            body = {"messages": messages, "temperature": 0, "max_tokens": 20, "tools": [ADD]}
            answers = [
                client.chat.completions.create(model=server.model, **body).choices[0].message
                for client in (through, alone)
            ]
            assert answers[0].content == answers[1].content
        [loaded] = _LOADED.findall(get(f"{decode.url}/metrics"))
        assert int(loaded) >= 3 * 10
