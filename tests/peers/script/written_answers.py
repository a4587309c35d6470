# SPDX-License-Identifier: Apache-2.0
"""Written answers to prompts of tests, and the sampling that follows them."""

from __future__ import annotations

import json
import os
from array import array
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

import pagoda.worker.sampling_state as sampling_state
from pagoda.backend.sampling_table import SamplingTable
from pagoda.messages.worker import SlotStart

FORMAT = "PAGODA_PEERS_FORMAT"
"""The variable with the format of tool calls, by the name of its parser."""
ANSWERS = "PAGODA_PEERS_ANSWERS"
"""The variable with the file of the answers; without it, answers.json has them."""
_BIAS = 1e4
"""Logits are at most some hundreds."""
_Sampling = sampling_state.SamplingState

Call = tuple[str, dict[str, object]]
"""Name and arguments of a tool call."""


@dataclass(frozen=True)
class Answer:
    """An answer to every prompt that has all of some texts in it."""

    texts: tuple[str, ...]
    content: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    constrained: bool | None = None
    """Whether the answer is to a request with a grammar; None if it may have one."""

    def is_to(self, prompt: str, *, constrained: bool) -> bool:
        return self.constrained in (None, constrained) and all(it in prompt for it in self.texts)

    def written(self, prompt: str, style: str) -> str:
        """The text behind a prompt, whose template may have opened or closed the reasoning."""
        text = self.content + _STYLES[style](self.calls) if self.calls else self.content
        tail = prompt.rstrip()
        if not self.reasoning or tail.endswith("</think>"):
            return text
        opened = "" if tail.endswith("<think>") else "<think>\n"
        return f"{opened}{self.reasoning}\n</think>\n\n{text}"


def _hermes(calls: tuple[Call, ...]) -> str:
    objects = ({"name": name, "arguments": arguments} for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{json.dumps(it)}\n</tool_call>" for it in objects)


def _llama3(calls: tuple[Call, ...]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": it}) for name, it in calls)


def _list(calls: tuple[Call, ...]) -> str:
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def _pythonic(calls: tuple[Call, ...]) -> str:
    terms = (
        f"{name}({', '.join(f'{k}={json.dumps(v)}' for k, v in it.items())})" for name, it in calls
    )
    return f"[{', '.join(terms)}]"


_STYLES = {
    "hermes": _hermes,
    "llama3_json": _llama3,
    "mistral": lambda calls: "[TOOL_CALLS]" + _list(calls),
    "granite": lambda calls: "<tool_call>" + _list(calls),
    "pythonic": _pythonic,
}


def load_answers() -> tuple[Answer, ...]:
    """The written answers, in the order of their file."""
    file = Path(os.environ.get(ANSWERS) or Path(__file__).with_name("answers.json"))
    answers = []
    for fields in json.loads(file.read_text(encoding="utf-8")):
        calls = tuple((call["name"], call["arguments"]) for call in fields.pop("calls", ()))
        content = fields.pop("content", "") * fields.pop("times", 1)
        answers.append(Answer(tuple(fields.pop("texts")), content, calls, **fields))
    return tuple(answers)


class ScriptedSampling:
    """The sampling of a request; what it says is compared with the answer as text, however it was cut."""

    changes = True
    needs_logits = True

    def __init__(
        self,
        start: SlotStart,
        table: SamplingTable,
        tokenizer: Tokenizer,
        answers: tuple[Answer, ...],
    ) -> None:
        self._state = _Sampling(start, table)
        self._slot, self._table = start.slot, table
        self._rules = table.row(start.slot).rules
        self._tokenizer = tokenizer
        self._said = list(start.token_ids[start.num_prompt_tokens :])
        self._end = start.eos_token_ids[0] if start.eos_token_ids else None
        self._prompt = self._text(list(start.token_ids[: start.num_prompt_tokens]))
        self._answers = answers
        self._is_constrained = self._rules.allowed is not None
        self._answer = self._find(constrained=self._is_constrained)
        self._wish()

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _find(self, *, constrained: bool) -> str:
        found = (it for it in self._answers if it.is_to(self._prompt, constrained=constrained))
        style = os.environ.get(FORMAT, "hermes")
        return next((it.written(self._prompt, style) for it in found), "")

    def _next(self) -> int | None:
        """The token that goes on with the answer; None if there is none, or something else has been said."""
        said = self._text(self._said)
        if not self._answer or not self._answer.startswith(said):
            return None
        rest = self._answer[len(said) :]
        if not rest:
            return self._end
        return int(self._tokenizer.encode(rest, add_special_tokens=False).ids[0])

    def _wish(self) -> None:
        """Makes the next token all but certain."""
        token_id, rules = self._next(), self._rules
        biases = dict(zip(rules.bias_ids, rules.biases, strict=True))
        if token_id is not None:
            biases[token_id] = _BIAS
        ids, values = array("q", biases), array("f", biases.values())
        row = self._table.row(self._slot)
        self._table.put(
            self._slot, replace(row, rules=replace(row.rules, bias_ids=ids, biases=values))
        )

    def take_mask(self, mask: bytes) -> None:
        self._state.take_mask(mask)
        if not self._is_constrained:  # the first mask says that there is a grammar
            self._is_constrained = True
            self._answer = self._find(constrained=True)
            self._wish()

    def append(self, token_id: int) -> None:
        self._said = [*self._said, token_id]
        self._state.append(token_id)
        self._wish()


def install(tokenizer_file: str) -> None:
    """Lets all requests of this worker be answered as they are written."""
    tokenizer, answers = Tokenizer.from_file(tokenizer_file), load_answers()

    def scripted(start: SlotStart, table: SamplingTable) -> ScriptedSampling:
        return ScriptedSampling(start, table, tokenizer, answers)

    sampling_state.SamplingState = scripted
