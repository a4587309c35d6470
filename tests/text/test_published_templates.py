# SPDX-License-Identifier: Apache-2.0
"""Chat templates as published with models, against transformers.

Histories with calls, results, reasoning, parts and prefills are rendered as there, or refused as there.
`published_templates.json` says where the templates come from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import msgspec
import pytest
from published_templates import JUDGES, PUBLISHED, SPECIAL, published

from pagoda.errors import InvalidRequestError
from pagoda.text.templates.conversation import Message, render_conversation

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "The city."}},
                "required": ["city"],
            },
        },
    }
]

Turn = dict[str, Any]
USER: Turn = {"role": "user", "content": "Is it warm?"}
SYSTEM: Turn = {"role": "system", "content": "Be brief."}
ANSWER: Turn = {"role": "assistant", "content": "It is warm."}
LATER: Turn = {"role": "user", "content": "And now?"}


def call(*cities: str, content: str | None = None, **fields: str) -> Turn:
    calls = [
        {
            "id": f"call0000{index}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps({"city": city})},
        }
        for index, city in enumerate(cities)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **fields}


def result(text: str, index: int = 0) -> Turn:
    return {"role": "tool", "tool_call_id": f"call0000{index}", "content": text}


def parts(role: str, *texts: str) -> Turn:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


HISTORIES: dict[str, list[Turn]] = {
    "a question": [USER],
    "a system message": [SYSTEM, USER],
    "an answer": [SYSTEM, USER, ANSWER, LATER],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "Look outside."}, LATER],
    "parts": [parts("user", "First.", "Second.")],
    "parts of the system": [parts("system", "Be brief."), USER],
    "parts of an answer": [USER, parts("assistant", "It is", " warm."), LATER],
    "a result": [USER, call("Oslo"), result("18 degrees")],
    "a result that was answered": [USER, call("Oslo"), result("18 degrees"), ANSWER, LATER],
    "no content beside a call": [SYSTEM, USER, call("Oslo", content=""), result("18 degrees")],
    "content beside a call": [USER, call("Oslo", content="Let me see."), result("18 degrees")],
    "reasoning before a call": [USER, call("Oslo", reasoning_content="Ask."), result("18 degrees")],
    "two calls": [USER, call("Oslo", "Rome"), result("18 degrees"), result("30 degrees", 1)],
}


def rendered(name: str, history: list[Turn], **options: Any) -> str | None:
    """The prompt; None if the template refuses the history, with a sentence on messages."""
    messages = msgspec.convert(history, list[Message])
    try:
        return render_conversation(published(name), messages, **options)
    except InvalidRequestError as error:
        if error.param not in ("messages", "continue_final_message"):
            raise
        return None


def oracle(name: str, history: list[Turn], **options: Any) -> str | None:
    from transformers.utils.chat_template_utils import render_jinja_template

    options = {"add_generation_prompt": True, **options}
    try:
        made, _ = render_jinja_template(
            [history], chat_template=PUBLISHED[name], **SPECIAL, **options
        )
    except Exception:
        return None
    return str(made[0])


def forms(history: list[Turn]) -> Iterator[list[Turn]]:
    """A history as users of transformers may write it for one model or another."""
    contents: tuple[Turn, ...] = ({"content": ""}, {}, {"content": None})
    spellings = ("as given", "text", "parts", "parts of the system")
    for spelling, empty, as_object in product(spellings, contents, (True, False)):
        written = [_written(turn, empty, spelling, as_object=as_object) for turn in history]
        yield written
        if any(len(turn.get("tool_calls") or ()) > 1 for turn in history):
            user, both, *results = written
            ones = [{**both, "tool_calls": [one]} for one in both["tool_calls"]]
            yield [user, ones[0], results[0], ones[1], results[1]]
        apart = [piece for turn in written for piece in _apart(turn, empty)]
        if apart != written:
            yield apart
        if any("reasoning_content" in turn for turn in history):
            yield [{**turn, "reasoning": turn.get("reasoning_content")} for turn in written]


def _written(turn: Turn, empty: Turn, spelling: str, *, as_object: bool) -> Turn:
    turn = dict(turn)
    if turn.get("tool_calls"):
        content = turn.pop("content")
        turn |= {"content": content} if content else empty
        turn["tool_calls"] = [
            {**one, "function": _function(one["function"], as_object=as_object)}
            for one in turn["tool_calls"]
        ]
    content = turn.get("content")
    if spelling in ("text", "parts") and isinstance(content, list):
        content = turn["content"] = "\n".join(part["text"] for part in content)
    if isinstance(content, str) and spelling in ("parts", f"parts of the {turn['role']}"):
        turn["content"] = [{"type": "text", "text": content}]
    return turn


def _function(function: Turn, *, as_object: bool) -> Turn:
    given = function["arguments"]
    return {**function, "arguments": json.loads(given) if as_object else given}


def _apart(turn: Turn, empty: Turn) -> list[Turn]:
    if not (turn.get("tool_calls") and turn.get("content")):
        return [turn]
    rest = {name: value for name, value in turn.items() if name != "tool_calls"}
    return [rest, {"role": "assistant", **empty, "tool_calls": turn["tool_calls"]}]


def in_words(
    history: list[Turn], write: Callable[[list[Turn]], str], *, with_results: bool
) -> Iterator[list[Turn]]:
    """A history with its calls in contents, and its results in one message of the user if they are written too."""
    written: list[Turn] = []
    for turn in history:
        turn = dict(turn)
        if calls := turn.pop("tool_calls", None):
            texts = [turn["content"] or "", write([one["function"] for one in calls])]
            turn["content"] = "\n".join(filter(None, texts))
        if turn["role"] == "tool" and with_results:
            text = f"<tool_response>\n{turn['content']}\n</tool_response>"
            if written[-1]["role"] == "user":
                written[-1]["content"] += "\n" + text
                continue
            turn = {"role": "user", "content": text}
        written.append(turn)
    yield from forms(written)


def hermes(functions: list[Turn]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{one["name"]}", "arguments": {one["arguments"]}}}\n</tool_call>'
        for one in functions
    )


def granite(functions: list[Turn]) -> str:
    listed = [f'{{"name": "{one["name"]}", "arguments": {one["arguments"]}}}' for one in functions]
    return f"<|tool_call|>[{', '.join(listed)}]"


def phi4(functions: list[Turn]) -> str:
    return granite(functions) + "<|/tool_call|>"


def kimi(functions: list[Turn]) -> str:
    listed = [
        f"<|tool_call_begin|>functions.{one['name']}:{index}<|tool_call_argument_begin|>"
        f"{one['arguments']}<|tool_call_end|>"
        for index, one in enumerate(functions)
    ]
    return f"<|tool_calls_section_begin|>{''.join(listed)}<|tool_calls_section_end|>"


def acceptable(name: str, history: list[Turn], **options: Any) -> Iterator[str]:
    """What transformers makes of the history: as it is, or with its calls in contents, as not all templates show
    them."""
    ways = [forms(history)]
    if any(turn.get("tool_calls") for turn in history):
        writers = (hermes, granite, phi4, kimi)
        ways += [
            in_words(history, write, with_results=with_results)
            for write, with_results in product(writers, (True, False))
        ]
    for way in ways:
        for form in way:
            made = oracle(name, form, **options)
            if made is not None:
                yield made


def shown_words(history: list[Turn]) -> list[str]:
    """Words that must not be lost: of calls and of their results."""
    cities = [
        json.loads(one["function"]["arguments"])["city"]
        for turn in history
        for one in turn.get("tool_calls") or ()
    ]
    return cities + [turn["content"] for turn in history if turn["role"] == "tool"]


def fault(name: str, history: list[Turn], **options: Any) -> str | None:
    """What is wrong with the prompt of a history; None if nothing is."""
    made = rendered(name, history, **options)
    if made is None:
        is_wrong = any(oracle(name, form, **options) is not None for form in forms(history))
        return "it is refused" if is_wrong else None
    if made not in acceptable(name, history, **options):
        return f"it differs:\n{made}"
    words = shown_words(history)
    if name not in JUDGES and not all(word in made for word in words):
        return f"it loses a call or a result:\n{made}"
    return None


EIGHTHS = [list(PUBLISHED)[index::8] for index in range(8)]


def prompt_of_tools() -> str:
    """The words in which Qwen3's template tells of tools, which are those of Hermes."""
    made = oracle("qwen3:0.6b", [{"role": "system", "content": "BEGIN"}, USER], tools=TOOLS)
    return str(made).split("BEGIN\n\n")[1].split("<|im_end|>")[0]


def with_tools(history: list[Turn], place: str) -> list[Turn]:
    """The history with its tools in its system message, in a field there, or before the user's first message."""
    field = place == "in_system"
    write = phi4 if field else hermes
    written = next(in_words(history, write, with_results=not field))
    text = ""
    if written[0]["role"] == "system":
        content = written.pop(0)["content"]
        text = content if isinstance(content, str) else content[0]["text"]
    if field:
        functions = json.dumps([tool["function"] for tool in TOOLS])
        return [{"role": "system", "content": text, "tools": functions}, *written]
    text = f"{text}\n\n{prompt_of_tools()}".strip()
    if place == "system":
        return [{"role": "system", "content": text}, *written]
    content = written[0]["content"]
    content = content if isinstance(content, str) else "\n".join(it["text"] for it in content)
    return [{"role": "user", "content": f"{text}\n\n{content}"}, *written[1:]]


def fault_with_tools(name: str, history: list[Turn]) -> str | None:
    traits = published(name).tool_traits
    if traits.tools == "shown":
        return fault(name, history, tools=TOOLS)
    place = traits.tools if traits.tools == "in_system" else "system"
    place = "user" if traits.system == "none" else place
    made = rendered(name, history, tools=TOOLS)
    shapes = forms(with_tools(history, place))
    makes = [oracle(name, shape) for shape in shapes]
    if made is None:
        is_wrong = any(other is not None for other in makes)
        return "it is refused" if is_wrong else None
    return None if made in makes else f"it differs:\n{made}"


PREFILLS = ("e", "im", "<", '{"a": ', " It is", "It is\n", "a", "user", "<|", "")


def fault_of_prefill(name: str, prefill: str) -> str | None:
    history = [USER, ANSWER, LATER, {"role": "assistant", "content": prefill}]
    made = rendered(name, history, continue_final_message=True)
    options = {"continue_final_message": True, "add_generation_prompt": False}
    makes = [oracle(name, form, **options) for form in forms(history)]
    return None if made in makes else f"{made!r} is not {makes[0]!r}"


@pytest.mark.parametrize("names", EIGHTHS, ids=map(str, range(8)))
def test_histories_are_rendered_as_by_transformers(names: list[str]) -> None:
    found = {
        (name, title, way.__name__): way(name, history)
        for name in names
        for title, history in HISTORIES.items()
        for way in (fault, fault_with_tools)
    }
    assert not {title: text for title, text in found.items() if text}


@pytest.mark.parametrize("names", EIGHTHS, ids=map(str, range(8)))
def test_prefills_are_placed_as_by_transformers(names: list[str]) -> None:
    found = {
        (name, prefill): fault_of_prefill(name, prefill) for name in names for prefill in PREFILLS
    }
    assert not {title: text for title, text in found.items() if text}
