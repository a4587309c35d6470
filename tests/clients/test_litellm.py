# SPDX-License-Identifier: Apache-2.0
"""litellm: its SDK, and its proxy before Pagoda, over several turns with tools."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import litellm
import openai
import pytest
from conversations import ADD, ANSWER, QUESTION

from conftest import Server, free_port, running

MESSAGES = [{"role": "user", "content": QUESTION}]
_KEY = f"sk-{secrets.token_hex()}"
"""Without a key that is hard to guess the proxy does not start."""


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk(server: Server, provider: str, stream: bool) -> None:
    answer = litellm.completion(
        model=f"{provider}/{server.model}",
        api_base=server.v1,
        api_key="none",
        messages=MESSAGES,
        temperature=0,
        stream=stream,
    )
    if stream:
        text = "".join(event.choices[0].delta.content or "" for event in answer)
    else:
        text = answer.choices[0].message.content
    assert ANSWER in text


def test_a_prompt_that_is_too_long_has_its_class(server: Server) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            model=f"openai/{server.model}",
            api_base=server.v1,
            api_key="none",
            messages=[{"role": "user", "content": "word " * 5000}],
        )


@pytest.fixture(scope="module")
def proxy(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = tmp_path_factory.mktemp("litellm") / "config.yaml"
    entry = f"{{model: openai/{server.model}, api_base: {server.v1}, api_key: none}}"
    config.write_text(
        f"model_list: [{{model_name: m, litellm_params: {entry}}}]\n"
        f"general_settings: {{master_key: {_KEY}}}\n"
    )
    port = free_port()
    program = Path(sys.executable).with_name("litellm")
    command = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    with running(command, f"http://127.0.0.1:{port}/health/liveliness"):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("stream", [False, True])
def test_turns_with_tools_through_the_proxy(proxy: str, stream: bool) -> None:
    """Answers go back with the fields that the proxy has added to them."""
    client = openai.OpenAI(base_url=proxy, api_key=_KEY, max_retries=0)
    messages = list(MESSAGES)
    for _ in range(3):
        if stream:
            with client.chat.completions.stream(
                model="m", messages=messages, tools=[ADD], temperature=0
            ) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = (
                client.chat.completions.create(
                    model="m", messages=messages, tools=[ADD], temperature=0
                )
                .choices[0]
                .message
            )
        messages.append(message.to_dict())
        calls = message.tool_calls or ()
        messages += [{"role": "tool", "tool_call_id": it.id, "content": "42"} for it in calls]
        messages.append({"role": "user", "content": QUESTION})
    assert len(messages) >= 7
