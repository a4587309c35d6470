# SPDX-License-Identifier: Apache-2.0
"""Held-out questions with answers that can be checked, and the checks.

A file holds one question a line: `id`, `skill`, the `messages`, `tools` and `chat_template_kwargs` of a chat
request, `max_tokens`, and under `expect` one of

    {"text": ...}       the answer, without white space around it, is this text
    {"contains": ...}   the answer holds this text
    {"json": ...}       the answer is JSON of exactly this value
    {"tool_call": ...}  the answer is one call of this tool (`name`) with these `arguments`
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from pagoda.checkpoints.resolve import resolve_model
from pagoda.cli.files import read_jsonl
from pagoda.cli.openai_client import ClientMessage
from pagoda.errors import ConfigError

_EMBEDDED_FILE = "heldout.jsonl"
_BODY_FIELDS = ("messages", "max_tokens", "tools", "chat_template_kwargs")


class ExpectedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, object]


class Expectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The required answer; exactly one field is set."""

    text: str | msgspec.UnsetType = msgspec.UNSET
    contains: str | msgspec.UnsetType = msgspec.UNSET
    json: object | msgspec.UnsetType = msgspec.UNSET
    tool_call: ExpectedCall | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if sum(value is not msgspec.UNSET for value in msgspec.structs.astuple(self)) != 1:
            raise ValueError("expect needs exactly one of text, contains, json and tool_call")

    def is_met_by(self, answer: ClientMessage) -> bool:
        if isinstance(self.tool_call, ExpectedCall):
            return _only_call(answer) == self.tool_call
        content = (answer.content or "").strip()
        if isinstance(self.text, str):
            return content == self.text.strip()
        if isinstance(self.contains, str):
            return self.contains in content
        return _is_json(content, self.json)


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    skill: str
    messages: list[dict[str, object]]
    max_tokens: int
    expect: Expectation
    tools: list[dict[str, object]] | None = None
    chat_template_kwargs: dict[str, object] | None = None

    def body(self, model: str) -> dict[str, object]:
        """The chat request that asks it, greedily."""
        asked = {field: getattr(self, field) for field in _BODY_FIELDS}
        sent = {field: value for field, value in asked.items() if value is not None}
        return {"model": model, "temperature": 0, **sent}


def load_questions(path: Path | None, skills: Sequence[str]) -> list[Question]:
    """The questions of a file, by default the embedded model's; of `skills` only, if any are named.

    Raises ConfigError if the file is missing, a line is not a question, or no question has such a skill.
    """
    file = path or Path(resolve_model(None).model) / _EMBEDDED_FILE
    questions = [question for _, question in read_jsonl(file, Question, "--questions")]
    known = sorted({question.skill for question in questions})
    for skill in skills:
        if skill not in known:
            raise ConfigError(f"--skill {skill} is not in {file}; it has {', '.join(known)}.")
    return [question for question in questions if not skills or question.skill in skills]


def _only_call(answer: ClientMessage) -> ExpectedCall | None:
    calls = answer.tool_calls or []
    if len(calls) != 1:
        return None
    function = calls[0].function
    try:
        arguments = msgspec.json.decode(function.arguments or "", type=dict[str, object])
    except msgspec.DecodeError:
        return None
    return ExpectedCall(name=function.name or "", arguments=arguments)


def _is_json(text: str, value: object) -> bool:
    try:
        return bool(msgspec.json.decode(text) == value)
    except msgspec.DecodeError:
        return False
