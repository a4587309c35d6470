# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters: how the tokens of one request are chosen, checked once at the edge."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import msgspec

from pagoda.errors import InvalidRequestError

MIN_TEMPERATURE = 1e-5
"""Temperature below which only the most likely token is sampled (as in vLLM)."""
DEFAULT_MAX_LOGPROBS = 20
ALL_LOGPROBS = -1
"""Number of likeliest tokens that stands for the whole vocabulary."""
MAX_SEQUENCES_PER_REQUEST = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_TOKEN_LIST = 1024
MAX_ALLOWED_TOKENS = 16384
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Range(NamedTuple):
    """The values that `SamplingParams.checked` allows, as metadata of a field's type."""

    low: float
    high: float
    excludes_low: bool = False

    def check(self, name: str, value: float) -> None:
        """Raises InvalidRequestError: the value of the field `name` is not in the range."""
        if not (self.low <= value <= self.high) or (self.excludes_low and value == self.low):
            bracket = "(" if self.excludes_low else "["
            _refuse(name, f"must be in {bracket}{self.low}, {self.high}]", value)

    def within(self, *shares: float) -> list[float]:
        """Values at these shares of the way from the low end to the high one."""
        return [self.low + share * (self.high - self.low) for share in shares]


@dataclass(frozen=True, kw_only=True)
class DrawOptions:
    """Parameters that count only where a token is drawn.

    Bodies of all APIs and flags have them by these names; a field's docstring is the help text of its flag.
    """

    temperature: float | None = None
    """0 takes the most likely token, as benchmarks do by default."""
    top_p: float | None = None
    """Sample from the smallest set of tokens, of those that min-p and top-k leave, whose probabilities add up to
    this."""
    top_k: int | None = None
    """Sample from this many most likely tokens."""
    min_p: float | None = None
    """Leave out tokens less likely than this times the most likely one, before top-k and top-p."""
    typical_p: float | None = None
    """Sample from the tokens of the most typical information whose probabilities add up to this."""


DRAWS = tuple(field.name for field in fields(DrawOptions))
if TYPE_CHECKING:

    class DrawFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """The fields of `DrawOptions` in the body of a request."""

else:
    DrawFields = msgspec.defstruct(
        "DrawFields",
        [(name, kind, None) for name, kind in get_type_hints(DrawOptions).items()],
        module=__name__,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint of an answer, named as in vLLM: one of the first five fields is given.

    It is checked where it becomes a `Grammar`.
    """

    json: Any = None
    """A JSON schema, as an object or as its text."""
    regex: Any = None
    """A regular expression that matches the whole answer."""
    choice: Any = None
    """Texts of which the answer is one."""
    grammar: Any = None
    """A grammar in Lark's syntax or in EBNF."""
    json_object: bool | None = None
    """The answer is any JSON object."""
    whitespace_pattern: Any = None
    """A regular expression of the white space between parts of JSON."""
    disable_any_whitespace: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters by which the tokens of one request are sampled, named as in vLLM; unchecked before `checked()`.

    `n`, `stop`, `include_stop_str_in_output`, `skip_special_tokens` and `structured_outputs` are served where
    text becomes token ids and token ids become text.
    """

    temperature: Annotated[float, Range(0.0, 100.0)] = 1.0
    """Divisor of the logits; below `MIN_TEMPERATURE` the most likely token is taken."""
    top_p: Annotated[float, Range(0.0, 1.0, excludes_low=True)] = 1.0
    """Sample from the smallest set of tokens whose probabilities add up to this (Holtzman et al. 2020)."""
    top_k: Annotated[int, Range(-1, 2**31 - 1)] = 0
    """Sample from the k most likely tokens; 0 or -1 means all."""
    min_p: Annotated[float, Range(0.0, 1.0)] = 0.0
    """Leave out tokens less likely than this times the most likely one (Nguyen et al. 2024)."""
    typical_p: Annotated[float, Range(0.0, 1.0, excludes_low=True)] = 1.0
    """Sample from the tokens whose information is nearest to the entropy and whose probabilities add up to this
    (locally typical sampling, Meister et al. 2022)."""
    seed: Annotated[int | None, Range(-(2**63), 2**64 - 1)] = None
    """Together with the position it determines every random number. Drawn at the frontend when absent."""
    presence_penalty: Annotated[float, Range(-2.0, 2.0)] = 0.0
    """Amount subtracted from the logit of every token that has been generated (OpenAI)."""
    frequency_penalty: Annotated[float, Range(-2.0, 2.0)] = 0.0
    """Amount subtracted from the logit of a generated token for each time it has occurred (OpenAI)."""
    repetition_penalty: Annotated[float, Range(0.01, 100.0)] = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al. 2019)."""
    logit_bias: dict[TokenId, float] | None = None
    allowed_token_ids: tuple[TokenId, ...] | None = None
    max_tokens: Annotated[int | None, Range(0, 2**31 - 1)] = 16
    """The most tokens to generate; None means as many as the context holds, 0 that only the prompt is computed."""
    min_tokens: Annotated[int, Range(0, 2**31 - 1)] = 0
    """End-of-sequence and stop tokens are not sampled before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it unless `include_stop_str_in_output`."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Token ids that end the answer, besides the model's own."""
    ignore_eos: bool = False
    logprobs: Annotated[int | None, Range(ALL_LOGPROBS, 2**31 - 1)] = None
    """Return the log-probability of each sampled token and of this many most likely ones; -1 means all."""
    prompt_logprobs: Annotated[int | None, Range(ALL_LOGPROBS, 2**31 - 1)] = None
    """The same for each token of the prompt but the first."""
    n: Annotated[int, Range(1, MAX_SEQUENCES_PER_REQUEST)] = 1
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    """The constraint of answers in Python. Bodies of HTTP requests have more ways to say it."""

    def checked(self) -> SamplingParams:
        """The same parameters, with sequences as tuples and a single stop string as a tuple of one.

        Raises InvalidRequestError, which names the field, if a value has a wrong type or is out of range.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        fields = {**msgspec.structs.asdict(self), "stop": stop}
        try:
            params = msgspec.convert(fields, SamplingParams)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"a sampling parameter is invalid: {error}.") from None
        params._check_ranges()
        return params

    def _check_ranges(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None:
                allowed.check(name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse(
                "min_tokens", f"must be at most max_tokens ({self.max_tokens})", self.min_tokens
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            _refuse("stop", f"takes at most {MAX_STOP_STRINGS} strings", len(self.stop))
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                _refuse(
                    "stop", f"takes strings of 1 to {MAX_STOP_STRING_CHARS} characters", len(text)
                )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _refuse("allowed_token_ids", "must name at least one token", "an empty list")
        for name, ids, most in (
            ("stop_token_ids", self.stop_token_ids, MAX_TOKEN_LIST),
            ("logit_bias", self.logit_bias, MAX_TOKEN_LIST),
            ("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS),
        ):
            if ids is not None and len(ids) > most:
                _refuse(name, f"takes at most {most} tokens", len(ids))
        for bias in (self.logit_bias or {}).values():
            Range(-100.0, 100.0).check("logit_bias", bias)

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    def without_draws(self) -> SamplingParams:
        """The same parameters where the most likely token is taken, whatever `DRAWS` were."""
        neutral = {name: getattr(SamplingParams(), name) for name in DRAWS}
        return msgspec.structs.replace(self, **{**neutral, "temperature": 0.0})

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequestError when a token id is not below `vocab_size`."""
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids),
            ("stop_token_ids", self.stop_token_ids),
        ):
            if ids and max(ids) >= vocab_size:
                _refuse(name, f"takes token ids below the vocabulary size {vocab_size}", max(ids))

    def check_logprobs(self, most: int, vocab_size: int) -> SamplingParams:
        """The parameters with -1 likeliest tokens as `vocab_size`.

        Raises InvalidRequestError: more than `most` likeliest tokens are asked for, where -1 allows any number."""
        numbers = {"logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
        if not any(numbers.values()):
            return self
        most = vocab_size if most == ALL_LOGPROBS else min(most, vocab_size)
        for name, number in numbers.items():
            if number == ALL_LOGPROBS:
                numbers[name] = number = vocab_size
            if number is not None and number > most:
                _refuse(name, f"must be at most {most}, which --max-logprobs raises", number)
        return msgspec.structs.replace(self, **numbers)

    def check_min_tokens(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Raises InvalidRequestError when `min_tokens` holds back every token that may be sampled."""
        held_back = {*eos_token_ids, *self.stop_token_ids}
        choices = range(vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids
        if self.min_tokens > 0 and all(token_id in held_back for token_id in choices):
            _refuse(
                "min_tokens",
                "must be 0 when every allowed token is a stop or end-of-sequence token",
                self.min_tokens,
            )


def _refuse(name: str, rule: str, value: object) -> None:
    raise InvalidRequestError(f"{name} {rule}, got {value}.", param=name)


def _ranges() -> dict[str, Range]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    notes = {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
    return {name: note for name, note in notes.items() if isinstance(note, Range)}


RANGES = _ranges()
