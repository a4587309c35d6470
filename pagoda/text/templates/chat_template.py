# SPDX-License-Identifier: Apache-2.0
"""Chat templates: the model's own Jinja template turns a conversation into the text that the model was trained on.

Templates come from the model directory or from the operator, never from a client. They run in Jinja's immutable
sandbox with the same extras as in Hugging Face transformers, and what one rendering may do is bounded
(`template_sandbox`).
"""

from __future__ import annotations

import re
import secrets
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes

from pagoda.errors import ConfigError, InvalidRequestError, refuse
from pagoda.text.answer_formats import recognise_tool_format
from pagoda.text.templates.generic_tools import SYSTEM_ROLES
from pagoda.text.templates.template_sandbox import (
    BUDGET,
    MAX_RENDERED_CHARS,
    Budget,
    Sandbox,
    TemplateError,
    TemplateRefusalError,
)
from pagoda.text.templates.template_traits import TemplateTraits, probe_traits
from pagoda.text.templates.template_turns import fitted_tools, fitted_turns

MAX_SWITCH_CHARS = 1024
MAX_SOURCE_CHARS = 2**20
"""Characters of a template. Those of models have some 10,000."""

_RESERVED = frozenset(
    {BUDGET, "messages", "tools", "documents", "tokenize", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "raise_exception", "strftime_now"}
)

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_ROLE = re.compile(r"[A-Za-z0-9_.-]+")
_NAMED_ROLES = frozenset({"user", "system"})
"""Roles whose several participants names tell apart. Calls name their functions; an assistant knows itself."""
_END_MARK = f"end{secrets.token_hex(8)}"
"""Word that no client knows, behind the content that the model continues: there the prompt is cut."""
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors that expressions of a template raise when the conversation lacks something."""


class _Source:
    """A compiled template."""

    def __init__(self, source: str) -> None:
        """Raises ConfigError: the source is not a Jinja template, or too long."""
        if len(source) > MAX_SOURCE_CHARS:
            raise ConfigError(f"the chat template has more than {MAX_SOURCE_CHARS} characters.")
        environment = Sandbox()
        try:
            tree = environment.parse(source)
            # Before the variables are looked for, which folds lists of constants into one.
            constants = [node.value for node in tree.find_all(jinja2.nodes.Const)]
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid Jinja: {error.message} (line {error.lineno})."
            ) from None
        except (RecursionError, MemoryError, SyntaxError):
            raise ConfigError("the chat template is nested too deeply to be compiled.") from None
        self.text = source
        self.words = frozenset(
            it for it in constants if isinstance(it, str) and _ROLE.fullmatch(it)
        )
        """Strings of the template that may be roles."""

    def render(self, budget: Budget, **variables: object) -> str:
        """Raises TemplateError: the template refuses the conversation, or breaks a limit."""
        parts, size = [], 0
        try:
            for part in self._template.generate(documents=None, **variables, **{BUDGET: budget}):
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise TemplateError(f"the prompt grows beyond {MAX_RENDERED_CHARS} characters")
                parts.append(part)
        except (TemplateError, *_TEMPLATE_FAULTS) as error:
            traceback.clear_frames(error.__traceback__)  # they hold the template's values
            if isinstance(error, TemplateError):
                raise
            raise TemplateRefusalError(str(error) or type(error).__name__) from error
        return "".join(parts)

    def probed(self, *, with_tools: bool, **variables: object) -> TemplateTraits:
        budget = Budget()  # one for all: a template that runs long ends them
        breaks_limits = False  # as it would each time, and hold much memory until it is collected

        def render(
            turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
        ) -> str:
            nonlocal breaks_limits
            if breaks_limits:
                return ""
            try:
                return self.render(
                    budget, messages=turns, tools=tools, add_generation_prompt=False, **variables
                )
            except TemplateError as error:
                breaks_limits = not isinstance(error, TemplateRefusalError)
                return ""

        return probe_traits(render, with_tools=with_tools)


class ChatTemplate:
    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        defaults: Mapping[str, object] | None = None,
        tool_use: str | None = None,
    ) -> None:
        """`defaults` are values of switches that a request leaves out. `tool_use` is the template of conversations
        with tools, where it is another.
        Raises ConfigError: a source is not a Jinja template. InvalidRequestError: as `render`, for a switch."""
        self.special_tokens = dict(special_tokens)
        self._defaults = dict(defaults or {})
        self._plain = _Source(source)
        self._tool_use = self._plain if tool_use is None else _Source(tool_use)
        self._check_switches(self._defaults)
        self._knows_developer = "developer" in source
        self._tool_format = recognise_tool_format(self.marks)
        self.traits, self.tool_traits = self._probed()

    @property
    def source(self) -> str:
        return self._plain.text

    @property
    def marks(self) -> str:
        """The text of all templates, in which the formats of answers show."""
        return self.source if self._tool_use is self._plain else self._tool_use.text + self.source

    @property
    def takes_tools(self) -> bool:
        """True if the template itself shows tools to the model."""
        return self.tool_traits.tools != "none"

    @property
    def switches(self) -> tuple[str, ...]:
        """The names that a client may set through `chat_template_kwargs`."""
        variables = self._plain.variables | self._tool_use.variables
        return tuple(sorted(variables - _RESERVED - self.special_tokens.keys()))

    def with_defaults(self, defaults: Mapping[str, object]) -> ChatTemplate:
        """The same template with other values of switches that a request leaves out."""
        tool_use = None if self._tool_use is self._plain else self._tool_use.text
        return ChatTemplate(
            self.source, special_tokens=self.special_tokens, defaults=defaults, tool_use=tool_use
        )

    def _probed(self) -> tuple[TemplateTraits, TemplateTraits]:
        """The traits without tools, and with them."""
        variables = {**self.special_tokens, **self._defaults}
        plain = self._plain.probed(with_tools=False, **variables)
        if "tools" in self._tool_use.variables:
            tooled = self._tool_use.probed(with_tools=True, **variables)
            if tooled.tools == "shown":
                return replace(plain, tools="shown"), tooled
        return plain, plain

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text of a conversation. None means the default: a generation prompt, unless the final message
        is continued. A template without tools gets them in a system message.

        `messages` are dicts with `role`, `content` (a string or text parts) and, as they occur, `tool_calls`,
        `tool_call_id`, `name` and `reasoning_content`.

        Raises InvalidRequestError: an option does not fit the template, or the template refuses the conversation.
        """
        if continue_final_message and add_generation_prompt:
            refuse("continue_final_message", "and add_generation_prompt exclude each other")
        given = {k: v for k, v in (chat_template_kwargs or {}).items() if v is not None}
        self._check_switches(given)
        traits = self.tool_traits if tools else self.traits
        self._check_roles(messages, traits)
        beginning = _beginning(messages) if continue_final_message else ""
        turns = [self._known(message, traits) for message in messages]
        if continue_final_message:
            turns[-1] = _marked(turns[-1])
        turns = fitted_turns(turns, traits, tools=tools, tool_format=self._tool_format)
        is_shown = bool(tools) and traits.tools == "shown"
        source = self._tool_use if is_shown else self._plain
        try:
            text = source.render(
                Budget(len(messages)),
                messages=turns,
                tools=fitted_tools(tools or (), traits) if is_shown else None,
                add_generation_prompt=add_generation_prompt is not False
                and not continue_final_message,
                **self.special_tokens,
                **{**self._defaults, **given},
            )
        except TemplateError as error:
            raise _refusal(str(error)) from error.__cause__
        return _cut_at_mark(text, beginning) if continue_final_message else text

    def _check_roles(self, messages: Sequence[Mapping[str, Any]], traits: TemplateTraits) -> None:
        """Refuses roles that the template does not know: some are written into the prompt as they are."""
        for index, message in enumerate(messages):
            role = message["role"]
            known = role in _ROLES or role in self._plain.words or role in self._tool_use.words
            if not known and not (traits.any_role and _ROLE.fullmatch(role)):
                listed = ", ".join(sorted(_ROLES))
                refuse(f"messages[{index}].role", f"must be one of {listed}, got {role!r}")

    def _known(self, message: Mapping[str, Any], traits: TemplateTraits) -> dict[str, Any]:
        """The message as the template knows it: else developers are the system, and names stand before texts."""
        turn = dict(message)
        if turn["role"] == "developer" and not self._knows_developer:
            turn["role"] = "system"
        name, content = turn.get("name"), turn.get("content")
        if name and turn["role"] in _NAMED_ROLES and not traits.names:
            if isinstance(content, list) and content:
                first = {**content[0], "text": f"{name}: {content[0]['text']}"}
                turn["content"] = [first, *content[1:]]
            else:
                turn["content"] = f"{name}: {content or ''}"
        return turn

    def _check_switches(self, switches: Mapping[str, object]) -> None:
        """Refuses what is not a switch. A name that the template lacks has no effect there, as with vLLM: clients
        set one switch for all their models."""
        for name, value in switches.items():
            param = f"chat_template_kwargs.{name}"[:MAX_SWITCH_CHARS]
            if name in _RESERVED or name in self.special_tokens:
                refuse(param, "cannot be set: it is the server's own")
            if not isinstance(value, bool | int | float | str):
                refuse(param, "must be a boolean, a number or a string")
            if isinstance(value, str) and len(value) > MAX_SWITCH_CHARS:
                refuse(param, f"must have at most {MAX_SWITCH_CHARS} characters, got {len(value)}")


def _refusal(reason: str) -> InvalidRequestError:
    line = reason.strip().partition("\n")[0].rstrip(".\r") or "it does not say why"
    return InvalidRequestError(
        f"the chat template refuses these messages: {line}.",
        param="messages",
    )


def _beginning(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text that the model continues. Raises InvalidRequestError: the last message has none."""
    content = messages[-1].get("content")
    if isinstance(content, list) and content:
        content = content[-1]["text"]
    if not isinstance(content, str) or messages[-1]["role"] in SYSTEM_ROLES:
        refuse("continue_final_message", "needs a last message with content, and not of the system")
    return content


def _marked(turn: dict[str, Any]) -> dict[str, Any]:
    """The turn with the mark behind its content. The space shows whether the template keeps white space there."""
    content = turn["content"]
    mark = f"{_END_MARK} "
    if isinstance(content, list):
        last = content[-1]
        return {**turn, "content": [*content[:-1], {**last, "text": last["text"] + mark}]}
    return {**turn, "content": content + mark}


def _cut_at_mark(text: str, beginning: str) -> str:
    """The rendering up to the mark. White space before it stays where the template keeps that behind it.
    Raises InvalidRequestError: the template does not render the content."""
    place = text.rfind(_END_MARK)
    if place < 0 or not text[:place].rstrip().endswith(beginning.strip()):
        refuse("continue_final_message", "needs a last message whose content the template renders")
    cut = text[:place]
    return cut if text.startswith(f"{_END_MARK} ", place) else cut.rstrip()


def read_template(path: Path) -> str:
    """The template in a file named by the operator. Raises ConfigError: the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--chat-template {str(path)!r} cannot be read: {reason}.") from None
