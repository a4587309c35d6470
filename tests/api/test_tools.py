# SPDX-License-Identifier: Apache-2.0
"""Tool calls, reasoning and their choices, in the formats of several model families."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from scripted_endpoint import TEXT
from tables import each_row
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from pagoda.text.answer_formats import ParserChoice
from pagoda.text.model_text import ModelText
from pagoda.text.templates.chat_template import ChatTemplate
from pagoda.text.tokenizers.detokenizer import byte_level_alphabet
from pagoda.text.tokenizers.tokenizer import Tokenizer

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SOURCE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.reasoning }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    "{% if reasoning_effort is defined %}effort={{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined %}thinks={{ enable_thinking }}{% endif %}"
)


def text(tool_call: str = "hermes", reasoning: str = "qwen3") -> ModelText:
    return ModelText(
        TEXT.tokenizer,
        ChatTemplate(SOURCE, special_tokens={}),
        TEXT.eos_token_ids,
        parsers=ParserChoice(tool_call, reasoning),
    )


WHOLE_AND_STREAM = pytest.mark.parametrize("stream", [False, True])


def prompt_of(api: Any) -> str:
    return bytes(api.endpoint.requests[-1].prompt_token_ids).decode()


def usage_of(answer: Any, *, stream: bool) -> Any:
    return (answer.events()[-1] if stream else answer.json())["usage"]


@WHOLE_AND_STREAM
async def test_reasoning_has_both_names_and_is_counted(serve_api, stream: bool) -> None:
    api = await serve_api("<think>why</think>so", text=text())
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await api.chat(stream=stream, **options)
    [choice] = answer.choices()
    message = choice["message"]
    assert (message["content"], message["reasoning"]) == ("so", "why")
    assert message["reasoning_content"] == "why"
    # The bytes of the opening tag are known as such with its last one.
    details = usage_of(answer, stream=stream)["completion_tokens_details"]
    assert details == {"reasoning_tokens": len(">why</think>")}


@pytest.mark.parametrize("written", ["<think>why</think>so", "so"])
async def test_every_chunk_has_a_field_of_reasoning(serve_api, written: str) -> None:
    """Null has one name: programs that take the other one as its alias refuse both."""
    api = await serve_api(written, text=text())
    for body in ({}, {"separate_reasoning": False}):
        for event in (await api.chat(stream=True, **body)).events():
            delta = event["choices"][0]["delta"]
            assert ("reasoning" in delta) == (delta["reasoning_content"] is not None)


@WHOLE_AND_STREAM
@pytest.mark.parametrize(
    ("body", "content", "reasoning"),
    [
        ({"include_reasoning": False}, "so", None),
        ({"separate_reasoning": False}, "<think>why</think>so", None),
        ({"stream_reasoning": False}, "so", "why"),
        ({"stream_reasoning": False, "max_tokens": 10}, "", "why"),
    ],
)
async def test_where_reasoning_goes(
    serve_api, stream: bool, body: dict[str, Any], content: str, reasoning: str | None
) -> None:
    api = await serve_api("<think>why</think>so", text=text())
    answer = await api.chat(stream=stream, **body)
    [choice] = answer.choices()
    message = choice["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
    if stream and "stream_reasoning" in body:
        deltas = [event["choices"][0]["delta"] for event in answer.events()]
        assert [d["reasoning"] for d in deltas if d.get("reasoning")] == ["why"]


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"reasoning_effort": "low"}, "[user]hieffort=lowthinks=True"),
        ({"reasoning_effort": "none"}, "[user]hieffort=nonethinks=False"),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            "[user]hieffort=highthinks=False",
        ),
        ({}, "[user]hi"),
    ],
)
async def test_effort_is_told_to_the_template(serve_api, body: dict[str, Any], prompt: str) -> None:
    api = await serve_api(text=text())
    assert (await api.chat(**body)).status == 200
    assert prompt_of(api) == prompt


async def test_gpt_oss_knows_three_efforts(serve_api) -> None:
    api = await serve_api("<|channel|>final<|message|>so", text=text("openai", "openai_gptoss"))
    answer = (await api.chat(reasoning_effort="minimal")).json()
    assert "effort=low" in prompt_of(api)
    assert answer["choices"][0]["message"]["content"] == "so"


@WHOLE_AND_STREAM
async def test_functions_as_before_tools(serve_api, stream: bool) -> None:
    api = await serve_api(CALL, text=text(), max_model_len=500)
    answer = await api.chat(functions=[FUNCTION], function_call="auto", stream=stream)
    [choice] = answer.choices()
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "add", "arguments": '{"a": 1}'}
    assert "tool_calls" not in choice["message"]
    assert prompt_of(api).startswith(json.dumps(TOOLS))


async def test_calls_and_results_of_functions_in_messages(serve_api) -> None:
    api = await serve_api(text=text())
    messages = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "add", "content": "2"},
    ]
    assert (await api.chat(messages=messages)).status == 200
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert prompt_of(api) == f"[user]1?[assistant]{json.dumps([call])}[tool]2"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_earlier_reasoning_reaches_the_template(serve_api, field: str) -> None:
    api = await serve_api(text=text())
    earlier = {"role": "assistant", "content": "so", field: "why"}
    assert (await api.chat(messages=[earlier, {"role": "user", "content": "?"}])).status == 200
    assert prompt_of(api) == "[assistant]sowhy[user]?"


@WHOLE_AND_STREAM
@pytest.mark.parametrize(
    ("name", "call", "call_id"),
    [
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}', r"[a-zA-Z0-9]{9}"),
        (
            "kimi_k2",
            '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
            r"functions\.add:0",
        ),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', r"call_[0-9a-f]{24}"),
    ],
)
async def test_ids_are_those_that_the_template_wants(
    serve_api, stream: bool, name: str, call: str, call_id: str
) -> None:
    api = await serve_api(call, text=text(name), max_model_len=500)
    [choice] = (await api.chat(tools=TOOLS, stream=stream)).choices()
    [made] = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert re.fullmatch(call_id, made["id"])
    assert choice["finish_reason"] == "tool_calls"


def test_special_tokens_of_a_format_reach_the_parser_and_nobody_else() -> None:
    backend = Backend(BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token in ("[TOOL_CALLS]", "[ARGS]", "[OTHER]")]
    )
    made = replace(text("mistral"), tokenizer=Tokenizer(backend))
    ids = [made.tokenizer.token_id(token) for token in ("[TOOL_CALLS]", "[ARGS]", "[OTHER]")]
    calls, args, other = ids
    decoder = made.tokenizer.incremental(
        (), skip_special_tokens=True, shown_tokens=made.formats.tokens(calls_tools=True)
    )
    letter, brace = (made.tokenizer.token_id(character) for character in "f{")
    said = "".join(decoder.push(i) for i in [other, calls, letter, args, brace])
    assert said == "[TOOL_CALLS]f[ARGS]{"
    plain = made.tokenizer.incremental((), skip_special_tokens=True)
    assert "".join(plain.push(i) for i in [other, calls, letter]) == "f"
    shown = made.tokenizer.incremental((), skip_special_tokens=False)
    assert shown.push(other) == "[OTHER]"


NOW = {"type": "function", "function": {"name": "now", "strict": True}}
FREE = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}, NOW]
ALLOWED = {"allowed_tools": {"mode": "required", "tools": [{"function": {"name": "now"}}]}}


def grammar_of(api: Any) -> str | None:
    grammar = api.endpoint.requests[-1].grammar
    return None if grammar is None else grammar.text


@pytest.mark.parametrize(
    ("body", "held", "free"),
    [
        ({"tools": TOOLS}, [], None),
        ({"tools": TOOLS, "tool_choice": "auto"}, [], None),
        ({"tools": FREE, "tool_choice": "none"}, [], None),
        ({"tools": TOOLS, "tool_choice": "required"}, ["add"], False),
        ({"tools": FREE, "tool_choice": "any"}, ["add", "now"], False),
        ({"tools": FREE}, ["add", "now"], True),
        (
            {"tools": FREE, "tool_choice": {"type": "function", "function": {"name": "now"}}},
            ["now"],
            False,
        ),
        (
            {
                "tools": FREE,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "auto",
                        "tools": [{"type": "function", "function": {"name": "add"}}],
                    },
                },
            },
            ["add"],
            True,
        ),
        (
            {"functions": [FUNCTION, {"name": "now"}], "function_call": {"name": "add"}},
            ["add"],
            False,
        ),
    ],
)
async def test_the_engine_is_told_what_may_be_called(
    serve_api, body: dict[str, Any], held: list[str], free: bool | None
) -> None:
    api = await serve_api(CALL, text=text(reasoning="none"), max_model_len=1000)
    assert (await api.chat(**body)).status == 200
    grammar = grammar_of(api)
    assert (grammar is None) == (free is None)
    if grammar is not None:
        assert [name for name in ("add", "now") if f'\\"{name}\\"' in grammar] == held
        assert ("TEXT" in grammar.split("\n")[1]) is free


@WHOLE_AND_STREAM
@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "add"}}, "stop"),
    ],
)
async def test_why_an_answer_that_must_call_ends(
    serve_api, stream: bool, choice: object, reason: str
) -> None:
    api = await serve_api(CALL, text=text(), max_model_len=1000)
    answer = await api.chat(tools=TOOLS, tool_choice=choice, stream=stream)
    [made] = answer.choices()
    assert made["finish_reason"] == reason
    assert made["message"]["tool_calls"][0]["function"]["name"] == "add"


@WHOLE_AND_STREAM
async def test_a_named_call_that_is_cut_off_ends_by_length(serve_api, stream: bool) -> None:
    cut = CALL[: CALL.index("arguments") + len('arguments": {"a')]
    api = await serve_api(cut, text=text(), max_model_len=1000)
    choice = {"type": "function", "function": {"name": "add"}}
    answer = await api.chat(
        tools=TOOLS, tool_choice=choice, stream=stream, max_tokens=len(cut.encode())
    )
    [made] = answer.choices()
    assert made["finish_reason"] == "length"
    assert made["message"]["tool_calls"][0]["function"]["name"] == "add"


async def test_an_answer_that_ends_before_the_call_that_it_must_make(serve_api) -> None:
    api = await serve_api(CALL, text=text(), max_model_len=1000)
    body = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 1}
    [choice] = (await api.chat(**body)).choices()
    assert (choice["finish_reason"], choice["message"]["tool_calls"]) == ("length", [])
    [choice] = (await api.chat(tools=TOOLS, max_tokens=1)).choices()
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("tool", [{}, {"type": "function", "function": {"parameters": 5}}])
async def test_tools_that_are_not_shown_need_not_be_any(serve_api, tool: dict[str, Any]) -> None:
    api = await serve_api("ok", text=text("hermes"))
    answer = await api.chat(tools=[tool], tool_choice="none")
    assert answer.json()["choices"][0]["message"]["content"] == "ok"
    assert (await api.chat(tools=[tool])).error()["param"].startswith("tools[0]")


async def test_a_model_with_no_format_can_be_made_to_call(serve_api) -> None:
    call = '[{"name": "add", "parameters": {"a": 1}}]'
    api = await serve_api(call, text=text("none"), max_model_len=1000)
    [choice] = (await api.chat(tools=TOOLS, tool_choice="required")).choices()
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert (await api.chat(tools=TOOLS)).error()["param"] == "tools"


async def test_a_budget_for_reasoning_leaves_room_for_calls(serve_api) -> None:
    backend = Backend(BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(tag) for tag in ("<think>", "</think>", "<tool_call>")])
    made = replace(text(), tokenizer=Tokenizer(backend))
    api = await serve_api("so", text=made, max_model_len=1000)
    assert (await api.chat(tools=TOOLS, thinking_token_budget=5)).status == 200
    grammar = grammar_of(api)
    assert grammar is not None
    assert f"<[{made.tokenizer.token_id('<tool_call>')}]>" in grammar
    assert "max_tokens=5" in grammar


async def test_a_budget_for_reasoning_needs_a_token(serve_api) -> None:
    api = await serve_api("so", text=text())
    error = (await api.chat(thinking_token_budget=5)).error()
    assert error["param"] == "thinking_token_budget"
    unthinking = await serve_api("so", text=text(reasoning="none"))
    assert (await unthinking.chat(thinking_token_budget=5)).status == 200
    assert grammar_of(unthinking) is None


@each_row(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": ALLOWED, "tools": FREE}, "tool_choice"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": []},
                },
                "tools": FREE,
            },
            "tool_choice.allowed_tools.tools",
        ),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ],
)
async def test_bad_choices_name_the_field(serve_api, body: dict[str, Any], param: str) -> None:
    api = await serve_api(text=text())
    answer = await api.chat(**body)
    assert (answer.status, answer.error()["param"]) == (400, param)


THOUGHT = "<think>\nQuestion: what?\n</think>\n\nIt is 4.\n\nQuestion: more?"


@WHOLE_AND_STREAM
@pytest.mark.parametrize(
    ("said", "stop", "content", "reasoning"),
    [
        (THOUGHT, ["Question:"], "It is 4.\n\n", "Question: what?"),
        (THOUGHT, ["\n\n"], "It is 4.", "Question: what?"),
        (THOUGHT, ["</think>"], "", "Question: what?"),
        ("<think>a stop b", ["stop"], "", "a stop b"),
        ("no thought; stop it", ["stop"], "no thought; ", None),
        ("<thin stop", ["stop"], "<thin ", None),
    ],
)
async def test_stop_strings_count_behind_reasoning(
    serve_api, stream: bool, said: str, stop: list[str], content: str, reasoning: str | None
) -> None:
    api = await serve_api(said, text=text())
    [choice] = (await api.chat(stop=stop, stream=stream)).choices()
    message = choice["message"]
    assert (message["content"] or "", message["reasoning_content"]) == (content, reasoning)
    assert choice["finish_reason"] == "stop"


async def test_stop_strings_count_outside_of_the_analysis_of_gpt_oss(serve_api) -> None:
    said = (
        "<|channel|>analysis<|message|>stop a<|end|><|start|>assistant"
        "<|channel|>final<|message|>b assistant, stop c"
    )
    api = await serve_api(said, text=text("openai", "openai_gptoss"))
    [choice] = (await api.chat(stop=["stop", "final", "nt<"])).choices()
    message = choice["message"]
    assert (message["content"], message["reasoning"]) == ("b assistant, ", "stop a")


@WHOLE_AND_STREAM
@pytest.mark.parametrize(
    ("said", "content", "reasoning", "num_calls"),
    [
        (f"<think>I call.\n{CALL}", None, "I call.", 1),
        (f"<think>A draft {CALL}\n so.</think>\n\nNo.", "No.", f"A draft {CALL}\n so.", 0),
        (f"<think>A draft {CALL}</think>{CALL}", None, f"A draft {CALL}", 1),
        ("<think>The tag <tool_call> begins one.", "", "The tag <tool_call> begins one.", 0),
        (f"<think>One {CALL} two {CALL}", None, "One  two", 2),
    ],
)
async def test_calls_in_reasoning_that_never_ends(
    serve_api, stream: bool, said: str, content: str | None, reasoning: str, num_calls: int
) -> None:
    api = await serve_api(said, text=text(), max_model_len=1000)
    [choice] = (await api.chat(tools=TOOLS, stream=stream)).choices()
    message = choice["message"]
    assert (message["content"] or "", message["reasoning"]) == (content or "", reasoning)
    assert len(message.get("tool_calls") or ()) == num_calls
    assert choice["finish_reason"] == ("tool_calls" if num_calls else "stop")


async def test_a_draft_in_reasoning_that_is_cut_off_is_no_call(serve_api) -> None:
    said = f"<think>A draft {CALL} is"
    api = await serve_api(said + " not yet</think>", text=text(), max_model_len=1000)
    [choice] = (await api.chat(tools=TOOLS, max_tokens=len(said))).choices()
    assert choice["message"]["reasoning"] == said.removeprefix("<think>")
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prefill", "said", "content", "reasoning"),
    [
        ("<think>I", " see</think>so", "so", " see"),
        ("<think>I see</think>It", " is so", " is so", None),
        ("It", " is so", " is so", None),
    ],
)
@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
async def test_a_prefill_may_open_and_close_reasoning(
    serve_api, parser: str, prefill: str, said: str, content: str, reasoning: str | None
) -> None:
    api = await serve_api(said, text=text(reasoning=parser))
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": prefill}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    [choice] = (await api.chat(messages=messages, stop=["ee"], **options)).choices()
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == (
        content,
        None if reasoning is None else reasoning.strip(),
    )


@WHOLE_AND_STREAM
async def test_a_stop_string_may_begin_before_the_fewest_tokens(serve_api, stream: bool) -> None:
    api = await serve_api("aSTOPbSTOPc", text=text(reasoning="none"))
    for min_tokens, content in ((4, "a"), (5, "aSTOPb"), (9, "aSTOPb"), (10, "aSTOPbSTOPc")):
        answer = await api.chat(stop=["STOP"], min_tokens=min_tokens, stream=stream)
        assert answer.choices()[0]["message"]["content"] == content
