"""Chat templates: the model's own Jinja template turns a conversation into the text that the model was trained on.

Templates come from the model directory or from the operator, never from a client. They run in Jinja's immutable
sandbox with the same extras as in Hugging Face transformers, and what one rendering may do is bounded
(`template_sandbox`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from pagoda.errors import ConfigError, InvalidRequestError, refuse
from pagoda.frontend.template_sandbox import (
    BUDGET,
    MAX_RENDERED_CHARS,
    Budget,
    Sandbox,
    TemplateError,
)

MAX_SWITCH_CHARS = 1024

_RESERVED = frozenset(
    {BUDGET, "messages", "tools", "documents", "tokenize", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "raise_exception", "strftime_now"}
)

_NAMED_ROLES = frozenset({"user", "system"})
"""Roles whose several participants names tell apart. Calls name their functions; an assistant knows itself."""
_PROBE = "name of a participant"
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


class ChatTemplate:
    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        defaults: Mapping[str, object] | None = None,
    ) -> None:
        """`defaults` are values of switches that a request leaves out.
        Raises ConfigError: the source is not a Jinja template. InvalidRequestError: as `render`, for a switch."""
        environment = Sandbox()
        try:
            tree = environment.parse(source)
            self._variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid Jinja: {error.message} (line {error.lineno})."
            ) from None
        except (RecursionError, MemoryError, SyntaxError):
            raise ConfigError("the chat template is nested too deeply to be compiled.") from None
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source
        self._shows_names = self._renders_name()
        self.takes_tools = "tools" in self._variables
        self._defaults = dict(defaults or {})
        self._check_switches(self._defaults)

    @property
    def switches(self) -> tuple[str, ...]:
        """The names that a client may set through `chat_template_kwargs`."""
        return tuple(sorted(self._variables - _RESERVED - self.special_tokens.keys()))

    def with_defaults(self, defaults: Mapping[str, object]) -> ChatTemplate:
        """The same template with other values of switches that a request leaves out."""
        return ChatTemplate(self.source, special_tokens=self.special_tokens, defaults=defaults)

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
        is continued.

        `messages` are dicts with `role`, `content` (a string) and, as they occur, `tool_calls` (with arguments as
        dicts), `tool_call_id`, `name` and `reasoning_content`.

        Raises InvalidRequestError: an option does not fit the template, or the template refuses the conversation.
        """
        if tools and not self.takes_tools:
            refuse("tools", "are not in this model's chat template")
        if continue_final_message and add_generation_prompt:
            refuse("continue_final_message", "and add_generation_prompt exclude each other")
        given = {k: v for k, v in (chat_template_kwargs or {}).items() if v is not None}
        self._check_switches(given)
        try:
            text = self._bounded(
                Budget(len(messages)),
                messages=[self._known(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt is not False
                and not continue_final_message,
                **self.special_tokens,
                **{**self._defaults, **given},
            )
        except TemplateError as error:
            raise _refusal(str(error)) from None
        except _TEMPLATE_FAULTS as error:
            raise _refusal(str(error) or type(error).__name__) from error
        return _cut_behind_last(text, messages) if continue_final_message else text

    def _bounded(self, budget: Budget, **variables: object) -> str:
        parts, size = [], 0
        for part in self._template.generate(**variables, **{BUDGET: budget}):
            size += len(part)
            if size > MAX_RENDERED_CHARS:
                raise TemplateError(f"the prompt grows beyond {MAX_RENDERED_CHARS} characters")
            parts.append(part)
        return "".join(parts)

    def _renders_name(self) -> bool:
        """True if the name of a user's message is seen in the prompt."""
        message = {"role": "user", "content": "", "name": _PROBE}
        try:
            return _PROBE in self._bounded(Budget(), messages=[message], **self.special_tokens)
        except (TemplateError, *_TEMPLATE_FAULTS):
            return False

    def _known(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message as the template knows it: else developers are the system, and names stand before texts."""
        if message["role"] == "developer" and not self._knows_developer:
            message = {**message, "role": "system"}
        name = message.get("name")
        if name and message["role"] in _NAMED_ROLES and not self._shows_names:
            message = {**message, "content": f"{name}: {message['content']}"}
        return message

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
    return InvalidRequestError(
        f"the chat template refuses these messages: {reason.splitlines()[0].rstrip('.')}.",
        param="messages",
    )


def _cut_behind_last(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The rendering up to the end of the last message, which the model then continues."""
    content = str(messages[-1].get("content") or "").strip()
    begin = text.rfind(content) if content else -1
    if begin < 0:
        refuse("continue_final_message", "needs a last message whose content the template renders")
    return text[: begin + len(content)]


def read_template(path: Path) -> str:
    """The template in a file named by the operator. Raises ConfigError: the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--chat-template {str(path)!r} cannot be read: {reason}.") from None
