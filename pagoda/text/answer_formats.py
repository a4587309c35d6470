# SPDX-License-Identifier: Apache-2.0
"""The formats in which model families write tool calls and reasoning: names, tags, and marks in chat templates.

Names are those of vLLM's parsers (https://docs.vllm.ai/en/latest/features/tool_calling.html).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from pagoda.errors import ConfigError

ToolFormatName = Literal[
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "pythonic",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "openai",
    "glm45",
    "granite",
    "phi4_mini_json",
    "bare_list",
]
"""`bare_list` is a JSON list of calls, for models that were trained on no format."""
AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class ReasoningFormat:
    """Tags of reasoning at the beginning of an answer."""

    begin: tuple[str, ...]
    end: tuple[str, ...]
    is_open: bool = False
    """Answers are within reasoning from their beginning, also if the prompt does not open it."""


THINK = ReasoningFormat(("<think>",), ("</think>",))
HARMONY = ReasoningFormat(("<|channel|>analysis<|message|>",), ("<|end|>",))
_REASONING: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "deepseek_r1": ReasoningFormat(THINK.begin, THINK.end, is_open=True),
        "deepseek_v3": THINK,
        "glm45": THINK,
        "granite": ReasoningFormat(
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
        ),
        "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",)),
        "openai_gptoss": HARMONY,
        "qwen3": THINK,
    }
)

_TOOL_MARKS: tuple[tuple[str, ToolFormatName], ...] = (
    ("<|channel|>", "openai"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("functools", "phi4_mini_json"),
    ("<|/tool_call|>", "phi4_mini_json"),
    ("<|/tool|>", "phi4_mini_json"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("func_name1(", "pythonic"),
    ('"parameters": dictionary', "llama3_json"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
)
"""Strings of chat templates and the format that they belong to; the first that occurs counts."""
_DEEPSEEK_MARK = "<｜tool▁calls▁begin｜>"
_REASONING_MARKS = (
    ("<|channel|>", "openai_gptoss"),
    ("[THINK]", "mistral"),
    ("Here is my thought process:", "granite"),
    ("</think>", "qwen3"),
)

_LLAMA_TOKENS = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
_TOOL_TOKENS: Mapping[ToolFormatName, tuple[str, ...]] = MappingProxyType(
    {
        "hermes": ("<tool_call>", "</tool_call>"),
        "qwen3_coder": ("<tool_call>", "</tool_call>"),
        "glm45": (
            *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"),
            "</arg_value>",
        ),
        "llama3_json": _LLAMA_TOKENS,
        "pythonic": _LLAMA_TOKENS,
        "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        "granite": ("<|tool_call|>", "<tool_call>", "</tool_call>"),
        "phi4_mini_json": ("<|tool_call|>", "<|/tool_call|>"),
        "kimi_k2": (
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    }
)
_DEEPSEEK_TOKENS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
)
_HARMONY_TOKENS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)


def recognise_tool_format(template: str) -> ToolFormatName | None:
    """The format of the calls in a chat template; None if it is none that is known."""
    if _DEEPSEEK_MARK in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    return next((name for mark, name in _TOOL_MARKS if mark in template), None)


def recognise_reasoning(template: str) -> ReasoningFormat | None:
    """The format of the reasoning in a chat template; None if the model does not think."""
    name = next((name for mark, name in _REASONING_MARKS if mark in template), None)
    return None if name is None else _REASONING[name]


@dataclass(frozen=True)
class AnswerFormats:
    """The formats in which a model writes."""

    tools: ToolFormatName | None = None
    reasoning: ReasoningFormat | None = None

    def tokens(self, *, calls_tools: bool) -> tuple[str, ...]:
        """The tokens that a parser must see, though they may be special ones."""
        if self.tools == "openai" or self.reasoning is HARMONY:
            return _HARMONY_TOKENS
        tokens: tuple[str, ...] = ()
        if self.reasoning is not None:
            tokens = self.reasoning.begin + self.reasoning.end
        if calls_tools and self.tools is not None:
            is_deepseek = self.tools in ("deepseek_v3", "deepseek_v31")
            tokens += _DEEPSEEK_TOKENS if is_deepseek else _TOOL_TOKENS.get(self.tools, ())
        return tokens


@dataclass(frozen=True)
class ParserChoice:
    """The parsers that an operator has chosen by name; `auto` leaves the choice to the chat template."""

    tool_call: str = AUTO
    reasoning: str = AUTO

    def __post_init__(self) -> None:
        """Raises ConfigError: there is no parser of that name."""
        self.formats("")

    def formats(self, template: str) -> AnswerFormats:
        """The formats of a model with this chat template."""
        tools = (
            recognise_tool_format(template)
            if self.tool_call == AUTO
            else _tool_format(self.tool_call)
        )
        reasoning = (
            recognise_reasoning(template)
            if self.reasoning == AUTO
            else _reasoning_format(self.reasoning)
        )
        return AnswerFormats(tools, reasoning)


def _tool_format(name: str) -> ToolFormatName | None:
    """The format named by `--tool-call-parser`; None for `none`. Raises ConfigError: there is no such format."""
    known: tuple[ToolFormatName, ...] = get_args(ToolFormatName)
    for format_name in known:
        if format_name == _plain(name):
            return format_name
    if name == NONE:
        return None
    raise ConfigError(
        f"--tool-call-parser {name!r} is not known; it is one of {', '.join((AUTO, NONE, *known))}."
    )


def _reasoning_format(name: str) -> ReasoningFormat | None:
    """The format named by `--reasoning-parser`; None for `none`. Raises ConfigError: there is no such format."""
    if name == NONE:
        return None
    found = _REASONING.get(_plain(name))
    if found is None:
        known = ", ".join((AUTO, NONE, *_REASONING))
        raise ConfigError(f"--reasoning-parser {name!r} is not known; it is one of {known}.")
    return found


def _plain(name: str) -> str:
    """A name as it is listed; SGLang writes dashes."""
    return name.replace("-", "_")
