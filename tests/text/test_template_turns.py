# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from operations import assert_linear
from published_templates import PUBLISHED, published

from pagoda.errors import InvalidRequestError
from pagoda.text.templates.chat_template import ChatTemplate
from pagoda.text.templates.conversation import Message, render_conversation
from pagoda.text.templates.template_traits import TemplateTraits
from pagoda.text.templates.template_turns import closed_object, fitted_turns

Turn = dict[str, Any]
USER: Turn = {"role": "user", "content": "Is it warm?"}


def call(*arguments: str, ids: bool = True, content: str | None = None) -> Turn:
    calls = [
        {"type": "function", "function": {"name": f"get{i}", "arguments": text}}
        | ({"id": f"call_{i:024}"} if ids else {})
        for i, text in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(text: str, index: int | None = 0) -> Turn:
    turn = {"role": "tool", "content": text}
    return turn if index is None else {**turn, "tool_call_id": f"call_{index:024}"}


def rendered(name: str, *turns: Turn, **options: Any) -> str:
    messages = msgspec.convert(list(turns), list[Message])
    return render_conversation(published(name), messages, **options)


OSLO = '{"city":"Oslo"}'


@pytest.mark.parametrize("content", [None, "", "Let me see."])
@pytest.mark.parametrize(
    "name", ["deepseek-v3.1:latest", "deepseek-r1:latest", "deepseek-r1:8b", "deepseek-v3:671b"]
)
def test_a_call_and_its_result_on_templates_that_write_arguments_as_text(
    name: str, content: str | None
) -> None:
    prompt = rendered(name, USER, call(OSLO, content=content), result("18 degrees"))
    assert OSLO in prompt
    assert "18 degrees" in prompt
    assert (content or "") in prompt


@pytest.mark.parametrize(
    "name", ["gemma3:1b", "llama4:latest", "qwen2.5vl:latest", "GLM-4.6.jinja"]
)
def test_parts_reach_templates_that_take_them(name: str) -> None:
    parts = [{"type": "text", "text": text} for text in ("First.", "Second.")]
    assert "First.Second." in rendered(name, {"role": "user", "content": parts})
    assert "First.\nSecond." in rendered("qwen3:0.6b", {"role": "user", "content": parts})


def test_a_system_message_on_a_template_that_reads_its_first_part() -> None:
    assert "[0]['content'][0]['text']" in PUBLISHED["gemma3:1b"]
    several = [{"type": "text", "text": text} for text in ("Be brief.", "Be kind.")]
    assert "Be brief.\n\nIs it" in rendered(
        "gemma3:1b", {"role": "system", "content": "Be brief."}, USER
    )
    assert "Be brief.\nBe kind." in rendered(
        "gemma3:1b", {"role": "developer", "content": several}, USER
    )


@pytest.mark.parametrize("name", ["qwen3-coder:30b", "qwen3:0.6b", "llama3.1:8b", "GLM-4.6.jinja"])
def test_arguments_that_broke_off(name: str) -> None:
    prompt = rendered(name, USER, call('{"city": "Os'), result("no JSON"))
    assert "Os" in prompt
    assert "no JSON" in prompt


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"city": "Os', {"city": "Os"}),
        ('{"city": "Os\\', {"city": "Os"}),
        ('{"a": [1, {"b": "c"', {"a": [1, {"b": "c"}]}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": 1, "b": tr', {"a": 1}),
        ('{"a": "x,{[", "b":', {"a": "x,{["}),
        ("{", {}),
        ("[1]", {"arguments": "[1]"}),
        ("null", {"arguments": "null"}),
        ("city=Oslo", {"arguments": "city=Oslo"}),
        ('{"a" "b"}', {}),
        ('["a', {"arguments": '["a'}),
        ('{"a":' * 100_000, {"arguments": '{"a":' * 100_000}),
    ],
)
def test_an_object_that_broke_off_is_closed(text: str, value: dict[str, Any]) -> None:
    assert closed_object(text) == value


def test_closing_takes_linear_work() -> None:
    assert_linear(lambda size: lambda: closed_object('{"a": [1, "' * size), [200, 400, 800])


@pytest.mark.parametrize("ids", [True, False])
def test_foreign_ids_of_calls_on_templates_that_check_them(ids: bool) -> None:
    turns = [
        USER,
        call(OSLO, OSLO, ids=ids),
        result("18", 0 if ids else None),
        result("30", 1 if ids else None),
    ]
    name = "mistralai-Mistral-Nemo-Instruct-2407.jinja"
    prompt = rendered(name, *turns)
    calls = json.loads(prompt.split("[TOOL_CALLS]")[1].split("</s>")[0])
    results = [
        json.loads(it.split("[/TOOL_RESULTS]")[0]) for it in prompt.split("[TOOL_RESULTS]")[1:]
    ]
    assert [it["id"] for it in calls] == [it["call_id"] for it in results]
    assert len({it["id"] for it in calls}) == 2
    assert prompt == rendered(name, *turns), "the prefix of a later request is the same"


def test_ids_that_templates_write_in_the_place_of_names() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.id }}>"
        "{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if m.role == 'tool' %}[{{ m.tool_call_id }}]{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source, special_tokens={})
    history = msgspec.convert(
        [USER, call(OSLO, OSLO), result("18"), result("30", 1)], list[Message]
    )
    prompt = render_conversation(template, history)
    assert '<functions.get0:0>{"city": "Oslo"}<functions.get1:1>' in prompt
    assert "18[functions.get0:0]30[functions.get1:1]" in prompt


def test_calls_without_ids_on_a_template_that_reads_them() -> None:
    turns = [USER, call(OSLO, ids=False), result("18 degrees", None)]
    for name in ("unsloth-Apriel-1.5.jinja", "upstage-Solar-Open-100B.jinja"):
        assert "18 degrees" in rendered(name, *turns)


def test_several_calls_on_templates_that_take_one() -> None:
    history = [USER, call(OSLO, OSLO), result("30 degrees", 1), result("18 degrees", 0)]
    prompt = rendered("llama3.1:8b", *history, {"role": "user", "content": "And now?"})
    order = ["get0", "18 degrees", "get1", "30 degrees", "And now?"]
    places = [prompt.index(word) for word in order]
    assert places == sorted(places)
    assert "30 degrees" in rendered("openai-gpt-oss-120b.jinja", *history)


def test_system_messages_on_templates_that_take_one() -> None:
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        USER,
        {"role": "assistant", "content": "Yes."},
        {"role": "system", "content": "Be bold."},
        {"role": "user", "content": "And now?"},
    ]
    for name in ("Qwen3.5-4B.jinja", "mistralai-Mistral-Nemo-Instruct-2407.jinja", "llama2:7b"):
        assert "Be brief.\n\nBe kind.\n\nBe bold." in rendered(name, *history), name
    in_place = rendered("qwen3:0.6b", *history)
    assert in_place.index("Yes.") < in_place.index("Be bold.")


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("granite3.3:2b", '<|tool_call|>[{"name": "get0", "arguments": {"city":"Oslo"}}]'),
        (
            "Kimi-K2-Instruct.jinja",
            "<|tool_call_begin|>functions.get0:0<|tool_call_argument_begin|>",
        ),
        ("phi4-mini:3.8b", '<|tool_call|>[{"name": "get0", "arguments": {"city":"Oslo"}}]<|/tool_'),
        (
            "smollm2:135m",
            '<tool_call>\n{"name": "get0", "arguments": {"city":"Oslo"}}\n</tool_call>',
        ),
    ],
)
def test_calls_on_templates_that_show_none(name: str, written: str) -> None:
    prompt = rendered(name, USER, call(OSLO), result("18 degrees"))
    assert written in prompt
    assert prompt.index(written) < prompt.index("18 degrees")


def test_tools_without_descriptions_and_parameters() -> None:
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    assert "type get_weather" in rendered("openai-gpt-oss-120b.jinja", USER, tools=tools)
    assert '{"name": "get_weather"}' in rendered("qwen3:0.6b", USER, tools=tools)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parts_are_never_written_out(name: str) -> None:
    """Some templates take parts, but not beside calls."""
    part = {"type": "text", "text": "Let me look."}
    answer = {"role": "assistant", "content": [part]}
    for turn in (answer, call(OSLO) | answer):
        with contextlib.suppress(InvalidRequestError):
            prompt = rendered(name, USER, turn, result("18"), {"role": "user", "content": [part]})
            assert "Let me look." in prompt
            assert "'type'" not in prompt


TEXTS = st.sampled_from(["x", "", " ws \n", "<think>t</think>y"])
PARTS = st.lists(TEXTS, max_size=3).map(lambda them: [{"type": "text", "text": it} for it in them])
CALL = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["c1", "aB3dE6gH9", None]),
        "function": st.fixed_dictionaries(
            {
                "name": st.just("f"),
                "arguments": st.sampled_from(
                    ["", "{}", '{"a": [1, {"b":', "[1]", "no", '{"a": null}']
                ),
            }
        ),
    }
)
TURN = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "tool"]),
        "content": TEXTS | PARTS,
        "name": st.sampled_from(["ada", None]),
        "tool_call_id": st.sampled_from(["c1", None]),
    }
) | st.fixed_dictionaries(
    {
        "role": st.just("assistant"),
        "content": TEXTS | PARTS | st.none(),
        "tool_calls": st.lists(CALL, max_size=3),
        "reasoning_content": st.sampled_from(["why", None]),
    }
)


@given(
    st.sampled_from(list(PUBLISHED)),
    st.lists(TURN, min_size=1, max_size=6),
    st.sampled_from([None, [{"type": "function", "function": {"name": "f"}}]]),
    st.booleans(),
)
@example(  # the template drops from its last message what another one has
    name="Reka-Edge.jinja",
    turns=[
        {"role": "system", "content": "<think>t</think>y"},
        {"role": "assistant", "content": "<think>t</think>y"},
    ],
    tools=None,
    continues=True,
)
def test_any_history_is_rendered_or_refused_in_a_sentence(
    name: str, turns: list[Turn], tools: list[Turn] | None, continues: bool
) -> None:
    try:
        prompt = rendered(name, *turns, tools=tools, continue_final_message=continues)
    except InvalidRequestError as error:
        if error.param not in ("messages", "continue_final_message"):
            raise
        return
    content = turns[-1]["content"] or ""
    last = content[-1]["text"] if isinstance(content, list) else content
    assert not continues or prompt.rstrip().endswith(last.strip())


def test_results_of_calls_with_one_id_all_stay() -> None:
    traits = TemplateTraits(calls=True, parallel_calls=False)
    calls = call("{}", "[]", ids=False)
    for one in calls["tool_calls"]:
        one["id"] = "c"
    results = [{**result(text), "tool_call_id": "c"} for text in ("one", "two", "three")]
    turns = fitted_turns([USER, calls, *results], traits)
    assert [turn["content"] for turn in turns] == [USER["content"], "", "one", "", "two", "three"]


def test_turns_that_need_nothing_stay_as_they_are() -> None:
    turns = [{"role": "system", "content": "S"}, dict(USER), {"role": "assistant", "content": "A"}]
    assert fitted_turns(turns, TemplateTraits(system="anywhere")) == turns


def test_fitting_takes_linear_work() -> None:
    traits = TemplateTraits(calls=True, parallel_calls=False, call_ids="short", system="first")

    def fit(size: int) -> Any:
        system = {"role": "system", "content": "S"}
        turns = [USER, call(*["{}"] * size), *(result("r", i) for i in range(size)), system]
        return lambda: fitted_turns(turns * 4, traits)

    assert_linear(fit, [50, 100, 200])
