"""Flags that several commands share, in groups. A field's docstring is its help text."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from pagoda.telemetry.logging import (
    LOG_FORMAT_ENV,
    LOG_LEVEL_ENV,
    LogFormat,
    LogLevel,
    configure_logging,
)

Count = Annotated[int, Parameter(validator=Number(gte=1))]
Length = Annotated[int, Parameter(validator=Number(gte=0))]
Seconds = Annotated[float, Parameter(validator=Number(gte=0))]


@Parameter(name="*", group=Group("General", sort_key=90))
@dataclass(frozen=True, kw_only=True)
class GeneralOptions:
    """Options of every command."""

    config: Path | None = None
    """A YAML file with flags of this command, one 'flag: value' a line."""
    log_level: LogLevel | None = None
    """The least important log lines to show; by default info in serve and route, else warning."""
    log_format: LogFormat = "text"
    """Log lines for people (text), or one JSON object a line (json)."""

    def apply(self, default_level: LogLevel = "warning") -> None:
        """Configures the log of this process and of the children that it will start."""
        level = self.log_level or default_level
        os.environ[LOG_LEVEL_ENV] = level
        os.environ[LOG_FORMAT_ENV] = self.log_format
        configure_logging(level, log_format=self.log_format)


@Parameter(name="*", group=Group("Sampling", sort_key=30))
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Parameters by which tokens are drawn."""

    temperature: float | None = None
    """0 takes the most likely token, as benchmarks do by default."""
    top_p: float | None = None
    """Sample from the smallest set of tokens whose probabilities add up to this."""
    top_k: int | None = None
    """Sample from this many most likely tokens."""
    min_p: float | None = None
    """Leave out tokens less likely than this times the most likely one."""
    typical_p: float | None = None
    """Sample from the tokens of the most typical information whose probabilities add up to this."""
    presence_penalty: float | None = None
    """A number to subtract from the logits of tokens that were generated."""
    frequency_penalty: float | None = None
    """A number to subtract from the logit of a token for each time that it was generated."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens in prompt or answer."""

    def body(self) -> dict[str, object]:
        """Body fields of the parameters that were given."""
        return _given(self)


@Parameter(name="*", group=Group("Sampling", sort_key=30))
@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Ends of answers."""

    max_tokens: Count | None = None
    """The longest answer in tokens."""
    stop: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    """A string that ends the answer; may be given several times."""

    def body(self, seed: int | None) -> dict[str, object]:
        return _given(self, stop=list(self.stop) or None, seed=seed)


def _given(options: SamplingOptions | AnswerOptions, **more: object) -> dict[str, object]:
    values = {field.name: getattr(options, field.name) for field in fields(options)} | more
    return {name: value for name, value in values.items() if value is not None}
