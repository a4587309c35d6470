from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from pagoda.errors import ConfigError, InvalidRequestError
from pagoda.frontend.chat_template import ChatTemplate, read_template

USER = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "a <b> & é", "parameters": {"type": "object"}},
    }
]
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role in ["user", "system"] %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": "é", "b": 2}}}
        ],
    },
    {"role": "tool", "content": "4"},
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("switches", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(
    switches: dict[str, bool], tools: list[dict[str, object]] | None, prompt: bool
) -> None:
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast(tokenizer_object=Backend(BPE()), chat_template=QWEN)
    expected = oracle.apply_chat_template(
        CONVERSATION, tools=tools, add_generation_prompt=prompt, tokenize=False, **switches
    )
    rendered = template(QWEN).render(
        CONVERSATION, tools=tools, add_generation_prompt=prompt, chat_template_kwargs=switches
    )
    assert rendered == expected


def test_special_tokens_are_variables() -> None:
    assert template("{{ bos_token }}{{ messages[0].content }}").render(USER) == "<s>hi"


@pytest.mark.parametrize(
    ("source", "can", "switches"),
    [(QWEN, True, ("enable_thinking",)), ("{{ messages[0].content }}", False, ())],
)
def test_tells_what_the_model_can_do(source: str, can: bool, switches: tuple[str, ...]) -> None:
    made = template(source)
    assert made.takes_tools == can
    assert made.switches == switches


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "messages", "tools", "bos_token"])
def test_what_is_the_servers_own_cannot_be_set(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be set") as caught:
        template(QWEN).render(USER, chat_template_kwargs={name: True})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_a_switch_that_the_template_lacks_has_no_effect() -> None:
    made = template(QWEN)
    assert made.render(USER, chat_template_kwargs={"thinking": True}) == made.render(USER)


def test_defaults_of_switches() -> None:
    made = template("{{ a }}{{ b }}").with_defaults({"a": 1, "b": 2})
    assert made.render(USER) == "12"
    assert made.render(USER, chat_template_kwargs={"a": 3, "b": None}) == "32"
    with pytest.raises(InvalidRequestError, match=r"^chat_template_kwargs\.messages cannot be set"):
        made.with_defaults({"messages": "x"})


def test_a_name_is_seen_by_the_model() -> None:
    messages = [{"role": "user", "content": "hi", "name": "ada"}]
    plain, named = "{{ messages[0].content }}", "{{ messages[0].name }}/{{ messages[0].content }}"
    assert template(plain).render(messages) == "ada: hi"
    assert template(named).render(messages) == "ada/hi"
    call = [{"role": "tool", "content": "1", "name": "add"}]
    assert template(plain).render(call) == "1", "the call names its function"


@pytest.mark.parametrize("value", [[], {}, "x" * 1025])
def test_switches_are_small_plain_values(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="enable_thinking"):
        template(QWEN).render(USER, chat_template_kwargs={"enable_thinking": value})


def test_a_developer_is_a_system_to_templates_that_know_none() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert template("{{ messages[0].role }}").render(messages) == "system"
    knows = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert template(knows).render(messages) == "yes"


def test_continues_the_final_message() -> None:
    messages = [*USER, {"role": "assistant", "content": "The answer is "}]
    rendered = template(QWEN).render(messages, continue_final_message=True)
    assert rendered.endswith("<|im_start|>assistant\nThe answer is")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate.') }}", "Roles must alternate"),
        ("{{ messages[0].missing.field }}", "missing"),
        ("{{ messages[0].content + 1 }}", "chat template refuses"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "Range too big"),
        ("{{ 'x' * 1000000000 }}", "small numbers"),
        ("{{ [1] * 1000000000 }}", "small numbers"),
        ("{{ 2 ** 10000000 }}", "small numbers"),
        ("{% for i in range(9999) %}{{ '%10000s' | format('x') }}{% endfor %}", "grows beyond"),
        ("{{ messages.append(1) }}", "chat template refuses"),
        ("{{ ''.__class__.__mro__ }}", "chat template refuses"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template refuses"),
    ],
)
def test_what_a_template_may_do_is_bounded(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        template(source).render(USER)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ " + "(" * 6000 + "1" + ")" * 6000 + " }}", "{{ x"]
)
def test_a_template_that_is_none_is_a_configuration_error(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        template(source)


@pytest.mark.parametrize(("name", "message"), [("none", "--chat-template"), ("latin1", "UTF-8")])
def test_a_template_file_that_cannot_be_read(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "latin1").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=message):
        read_template(tmp_path / name)
