# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from published_templates import PUBLISHED

from pagoda.errors import ConfigError
from pagoda.text.answer_formats import HARMONY, THINK, ParserChoice


@pytest.mark.parametrize(
    ("mark", "tools", "reasoning"),
    [
        ('<tool_call>\n{"name": f}</tool_call> </think>', "hermes", THINK),
        ("<tool_call>\n<function=f>\n<parameter=a>", "qwen3_coder", None),
        ("<tool_call>{{ name }}\n<arg_key></think>", "glm45", THINK),
        ("{{ '<|python_tag|>' }}", "llama3_json", None),
        ('{"name": function name, "parameters": dictionary of arguments}', "llama3_json", None),
        (
            '{"name": f, "parameters": dictionary of arguments} <|python_start|>',
            "llama3_json",
            None,
        ),
        ("[func_name1(params_name1=params_value1), func_name2(params)]", "pythonic", None),
        ("[TOOL_CALLS] [THINK]", "mistral", None),
        ("<｜tool▁calls▁begin｜>```json", "deepseek_v3", None),
        ("<｜tool▁calls▁begin｜><｜tool▁sep｜></think>", "deepseek_v31", THINK),
        ("<|tool_calls_section_begin|>", "kimi_k2", None),
        ("<|channel|>analysis<|message|>", "openai", HARMONY),
        ("<|tool_call|>", "granite", None),
        ("<|tool|>{{ tools }}<|/tool|>", "phi4_mini_json", None),
        ("{{ messages }}", None, None),
    ],
)
def test_formats_are_recognised_by_the_template(
    mark: str, tools: str | None, reasoning: object
) -> None:
    formats = ParserChoice().formats(mark)
    assert formats.tools == tools
    if "[THINK]" in mark:
        assert formats.reasoning is not None
        assert formats.reasoning.begin == ("[THINK]",)
    else:
        assert formats.reasoning is reasoning


def test_llama_4_calls_in_json_as_its_template_asks() -> None:
    assert ParserChoice().formats(PUBLISHED["llama4:latest"]).tools == "llama3_json"


def test_the_operators_choice_comes_first() -> None:
    formats = ParserChoice("llama3_json", "none").formats("<tool_call></think>")
    assert (formats.tools, formats.reasoning) == ("llama3_json", None)
    assert ParserChoice("none", "qwen3").formats("<tool_call>").tools is None


@pytest.mark.parametrize(
    ("choice", "flag", "known"),
    [
        (("qwen", "auto"), "--tool-call-parser 'qwen'", "hermes"),
        (("auto", "qwen"), "--reasoning-parser 'qwen'", "deepseek_r1"),
    ],
)
def test_unknown_names_are_told_the_known_ones(
    choice: tuple[str, str], flag: str, known: str
) -> None:
    with pytest.raises(ConfigError, match=flag) as caught:
        ParserChoice(*choice)
    assert known in str(caught.value)


def test_tokens_that_a_parser_must_see() -> None:
    mistral = ParserChoice().formats("[TOOL_CALLS][THINK]")
    assert "[ARGS]" in mistral.tokens(calls_tools=True)
    assert mistral.tokens(calls_tools=False) == ("[THINK]", "[/THINK]")
    assert "<|channel|>" in ParserChoice("openai").formats("").tokens(calls_tools=False)
    assert ParserChoice().formats("").tokens(calls_tools=True) == ()
