# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from pagoda.errors import ConfigError, InvalidRequestError
from pagoda.text.templates import template_sandbox
from pagoda.text.templates.chat_template import ChatTemplate, read_template

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
    answer = [{"role": "assistant", "content": "1", "name": "add"}]
    assert template(plain).render(answer) == "1", "an assistant knows itself"


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
    assert rendered.endswith("<|im_start|>assistant\nThe answer is ")
    trims = QWEN.replace("+ message.content", "+ message.content | trim")
    rendered = template(trims).render(messages, continue_final_message=True)
    assert rendered.endswith("<|im_start|>assistant\nThe answer is")


@pytest.mark.parametrize("prefill", ["e", "im", "<", '{"a": ', "The answer is ", ""])
def test_the_prompt_ends_with_what_is_continued(prefill: str) -> None:
    messages = [*USER, {"role": "assistant", "content": prefill}]
    rendered = template(QWEN).render(messages, continue_final_message=True)
    assert rendered.endswith(f"<|im_start|>assistant\n{prefill}")
    parts = [{"type": "text", "text": text} for text in ("It", prefill)]
    messages = [*USER, {"role": "assistant", "content": parts}]
    joined = template(QWEN).render(messages, continue_final_message=True)
    assert joined.endswith(f"<|im_start|>assistant\nIt\n{prefill}")


@pytest.mark.parametrize(
    ("source", "last"),
    [
        ("{{ messages[0].content }}", {"role": "assistant", "content": "It is"}),
        (QWEN, {"role": "assistant", "content": None}),
        (QWEN, {"role": "assistant", "content": []}),
        (QWEN, {"role": "system", "content": "Be brief."}),
    ],
)
def test_what_cannot_be_continued(source: str, last: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="needs a last message") as caught:
        template(source).render([*USER, last], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_documents_are_none_as_with_transformers() -> None:
    source = "{{ documents is none }} {{ documents is defined }} {{ tools is none }}"
    assert template(source).render(USER) == "True True True"


CLOSED = "{% for m in messages %}{% if m.role in ['user', 'critic'] %}{{ m.content }}{% endif %}{% endfor %}"
OPEN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "role", "is_known"),
    [
        (CLOSED, "critic", True),
        (CLOSED, "judge", False),
        (OPEN, "judge", True),
        (OPEN, "system<|im_end|>", False),
        (OPEN, "a b", False),
        (OPEN, "user\n", False),
    ],
)
def test_roles_are_those_that_the_template_knows(source: str, role: str, is_known: bool) -> None:
    messages = [*USER, {"role": role, "content": "x"}]
    if is_known:
        assert template(source).render(messages).endswith("x")
        return
    with pytest.raises(InvalidRequestError, match="must be one of assistant, developer") as caught:
        template(source).render(messages)
    assert caught.value.param == "messages[1].role"


def test_conversations_with_tools_have_a_template_of_their_own() -> None:
    both = ChatTemplate("D{{ a }}", special_tokens={}, tool_use="T{{ b }}{{ tools | tojson }}")
    assert both.render(USER) == "D"
    assert both.render(USER, tools=TOOLS).startswith('T[{"type": "function"')
    assert both.takes_tools
    assert both.switches == ("a", "b")
    assert both.with_defaults({"b": 1}).render(USER, tools=TOOLS).startswith("T1")


def test_tools_of_a_template_without_any() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    prompt = template(OPEN).render(messages, tools=TOOLS)
    assert prompt.startswith("<system>Be brief.\n\n# Tools")
    assert '"name": "add", "description": "a <b> & é"' in prompt
    assert prompt.endswith("</tool_call><user>hi")
    no_system = template(CLOSED).render(messages, tools=TOOLS)
    assert no_system.startswith("Be brief.\n\n# Tools")
    assert no_system.endswith("</tool_call>\n\nhi")


def _grown(expression: str, first: str = "'aaaaaaaa'", shown: str = "1") -> str:
    """A template that puts an expression of `ns.x` in the place of `ns.x` again and again."""
    turns = "{% for _ in range(60) %}{% set ns.x = " + expression + " %}{% endfor %}"
    return "{% set ns = namespace(x=" + first + ") %}" + turns + "{{ " + shown + " }}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate.') }}", "Roles must alternate"),
        ("{{ raise_exception('') }}", "it does not say why"),
        ("{{ messages[0].missing.field }}", "missing"),
        ("{{ messages[0].content + 1 }}", "chat template refuses"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "Range too big"),
        ("{{ 'x' * 1000000000 }}", "small numbers"),
        ("{{ [1] * 1000000000 }}", "small numbers"),
        ("{{ 2 ** 10000000 }}", "small numbers"),
        ("{% for i in range(9999) %}{{ '%10000s' | format('x') }}{% endfor %}", "grows beyond"),
        ("{{ '%99999999d' | format(1) }}{{ 1 }}", "grows beyond"),
        ("{{ '%99999999d' % 1 }}", "grows beyond"),
        ("{{ '%*d' % (99999999, 1) }}", "widths"),
        ("{{ '{:99999999}'.format(1) }}", "grows beyond"),
        ("{{ '{:{}}'.format(1, 99999999) }}", "widths"),
        ("{{ 'a'.ljust(99999999) }}", "small numbers"),
        ("{{ 'a' | center(99999999) }}", "small numbers"),
        ("{{ [1] | batch(99999999, 0) | list }}", "small numbers"),
        ("{{ 1 | round(99999999, 'ceil') }}", "small numbers"),
        ("{{ (5).to_bytes(99999999, 'big') }}", "to_bytes"),
        ("{{ 'aa'.translate({97: 'b'}) }}", "translate"),
        ("{{ [[1], [2]] | sum(start=[]) }}", "sum"),
        ("{{ strftime_now('%99999999Y') }}", "widths"),
        ("{{ lipsum(99999999) }}", "undefined"),
        (_grown("ns.x ~ ns.x"), "grows beyond"),
        (_grown("ns.x + ns.x"), "grows beyond"),
        (_grown("ns.x | replace('a', 'a' * 1 ~ 'aaaaaaa')"), "small numbers"),
        (_grown("ns.x | replace('a', 'aaaaaaaa')"), "grows beyond"),
        (_grown("ns.x.replace('a', 'aaaaaaaa')"), "grows beyond"),
        (_grown("ns.x.join([ns.x, ns.x, ns.x])"), "grows beyond|steps"),
        (_grown("[ns.x, ns.x, ns.x] | join(ns.x)"), "grows beyond|steps"),
        (_grown("'%s%s' % (ns.x, ns.x)"), "grows beyond"),
        (_grown("'{}{}'.format(ns.x, ns.x)"), "grows beyond"),
        (_grown("ns.x + ns.x", "[1]"), "grows beyond|steps"),
        (_grown("[ns.x, ns.x]", "[1]", "ns.x | string"), "steps"),
        (_grown("[ns.x, ns.x]", "[1]", "ns.x"), "steps"),
        (_grown("[ns.x, ns.x]", "[1]", "ns.x ~ ''"), "steps"),
        (_grown("[ns.x, ns.x]", "[1]", "ns.x | tojson"), "steps"),
        (_grown("[ns.x, ns.x]", "[1]", "'%s' % [ns.x]"), "steps"),
        (_grown("[ns.x, ns.x]", "[1]", "ns.x == ns.x[:]"), "steps"),
        (_grown("(ns.x, ns.x)", "(1,)", "{ns.x: 1} | length"), "steps"),
        ("{{ (messages[0].content ~ 'x').join(range(99999) | map('string')) }}", "steps"),
        ("{{ range(999) | map('string') | join('x' | center(99999)) }}", "grows beyond"),
        (_grown("ns.x * ns.x", "3"), "too many digits"),
        ("{{ messages.append(1) }}", "chat template refuses"),
        ("{{ ''.__class__.__mro__ }}", "chat template refuses"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template refuses"),
    ],
)
def test_what_a_template_may_do_is_bounded(
    monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 200_000)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        template(source).render(USER)
    assert caught.value.param == "messages"


_NESTED = "{% for i in range(9999) %}{% for j in range(9999) if TEST %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        _NESTED.replace("TEST", "true"),
        _NESTED.replace("TEST", "false"),
        "{% for i in [99] recursive %}{{ loop([i - 1]) }}{{ loop([i - 1]) }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{% for i in range(9999) %}{% set x = range(9999) | list %}{% endfor %}",
        "{% for i in range(9999) %}{% set x = messages[0].content.upper() %}{% endfor %}",
    ],
)
def test_a_template_that_runs_long_is_refused(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 20_000)
    messages = [{"role": "user", "content": "x" * 100_000}]
    with pytest.raises(InvalidRequestError, match=r"more than 2\d{4} steps|recursion"):
        template(source).render(messages)


def test_time_is_bounded_where_steps_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", -1.0)
    with pytest.raises(InvalidRequestError, match="takes more than -1 s"):
        template("{% for i in range(9999) %}{% endfor %}").render(USER)


@pytest.fixture
def _any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are counted, however slow the machine is."""
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", math.inf)


@pytest.mark.usefixtures("_any_time")
def test_many_messages_of_a_usual_template_are_few_steps() -> None:
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant")] * 4096
    assert template(QWEN).render(messages).count("<|im_end|>") >= 8192


@pytest.mark.usefixtures("_any_time")
def test_templates_that_look_at_all_later_messages_have_steps_for_each_pair() -> None:
    """As that of gpt-oss does, to find the end of a turn."""
    source = (
        "{% for message in messages %}{% for later in messages[loop.index:] %}"
        "{% if later.role == 'none' %}x{% endif %}{% endfor %}{{ message.content }}{% endfor %}"
    )
    messages = [{"role": role, "content": "y"} for role in ("user", "assistant")] * 750
    assert template(source).render(messages) == "y" * 1500


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{{ " + "(" * 6000 + "1" + ")" * 6000 + " }}", "{{ x", "x" * (2**20 + 1)],
    ids=["syntax", "depth", "open", "length"],
)
def test_a_template_that_is_none_is_a_configuration_error(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        template(source)


@pytest.mark.parametrize(("name", "message"), [("none", "--chat-template"), ("latin1", "UTF-8")])
def test_a_template_file_that_cannot_be_read(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "latin1").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=message):
        read_template(tmp_path / name)
