# SPDX-License-Identifier: Apache-2.0
"""Flags that several commands share, in groups. A field's docstring is its help text."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, Protocol

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from pagoda.errors import ConfigError
from pagoda.files import read_file
from pagoda.ipc.amounts import parse_bytes
from pagoda.ipc.clock import MAX_TIMEOUT_S
from pagoda.ipc.tls import TlsFiles, client_context
from pagoda.messages.sampling_params import DrawOptions
from pagoda.telemetry.logging import (
    LOG_FORMAT_ENV,
    LOG_LEVEL_ENV,
    LogFormat,
    LogLevel,
    configure_logging,
)
from pagoda.telemetry.tracer import DEFAULT_DIRECTORY, LEVELS, ProfileConfig
from pagoda.text.grammars.constraints import grammar_of

Count = Annotated[int, Parameter(validator=Number(gte=1))]
Length = Annotated[int, Parameter(validator=Number(gte=0))]
Seconds = Annotated[float, Parameter(validator=Number(gte=0, lte=MAX_TIMEOUT_S))]


SERVER = Group("Server", sort_key=5)
"""Flags of a server's address and API."""


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


@Parameter(name="*", group=Group("Traces", sort_key=80))
@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Traces of all processes."""

    profile: Literal["e2e", "kernel", "verbose"] | None = None
    """Trace from the start: requests and steps, the operations of each step as well, or each token too."""
    profile_dir: Path = DEFAULT_DIRECTORY
    """The directory of traces; of a server, also of those that POST /profile/start begins."""

    def config(self) -> ProfileConfig:
        return ProfileConfig(
            directory=self.profile_dir, level=None if self.profile is None else LEVELS[self.profile]
        )


@Parameter(name="*", group=Group("TLS", sort_key=70))
@dataclass(frozen=True, kw_only=True)
class TrustOptions:
    """Certificates of a client of https."""

    ssl_ca_certs: Path | None = None
    """A PEM file of the authorities by which the server is known, instead of those of this machine."""
    ssl_certfile: Path | None = None
    """A PEM file with the certificate to show to a server that asks for one."""
    ssl_keyfile: Path | None = None
    """The PEM file of its key, if that is not in the same file."""

    @property
    def context(self) -> ssl.SSLContext:
        """Raises ConfigError: a file cannot be used."""
        return client_context(tls_files(self))


class SslFlags(Protocol):
    """Options of servers and of clients."""

    @property
    def ssl_certfile(self) -> Path | None: ...
    @property
    def ssl_keyfile(self) -> Path | None: ...
    @property
    def ssl_ca_certs(self) -> Path | None: ...


def tls_files(flags: SslFlags) -> TlsFiles:
    """The files that the flags name. Raises ConfigError: a key has no certificate."""
    names = ("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs")
    files = TlsFiles(flags.ssl_certfile, flags.ssl_keyfile, flags.ssl_ca_certs, names)
    files.check()
    return files


@Parameter(name="*", group=Group("Sampling", sort_key=30))
@dataclass(frozen=True, kw_only=True)
class SamplingOptions(DrawOptions):
    """Parameters by which tokens are chosen."""

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


@Parameter(name="*", group=Group("Constraints", sort_key=31))
@dataclass(frozen=True, kw_only=True)
class ConstraintOptions:
    """Constraints of answers; at most one of them is given."""

    json_schema: Path | None = None
    """A file with a JSON schema that answers fit."""
    regex: str | None = None
    """A regular expression that matches answers as a whole."""
    choice: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    """A text that an answer may be; may be given several times."""
    grammar: Path | None = None
    """A file with a grammar of answers, in Lark's syntax or in EBNF."""

    def body(self) -> dict[str, object]:
        """Body fields of the constraint, if there is one.
        Raises ConfigError: there are two, or a file cannot be read; InvalidRequestError: a constraint is wrong."""
        given: dict[str, tuple[str, object]] = {}
        if self.json_schema is not None:
            given["--json-schema"] = "json", _text_of(self.json_schema, "--json-schema")
        if self.regex is not None:
            given["--regex"] = "regex", self.regex
        if self.choice:
            given["--choice"] = "choice", list(self.choice)
        if self.grammar is not None:
            given["--grammar"] = "grammar", _text_of(self.grammar, "--grammar")
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both constrain answers; give one of them.")
        for flag, (kind, value) in given.items():
            grammar_of(kind, value, flag, {})
        return {"structured_outputs": dict(given.values())} if given else {}


def _text_of(path: Path, flag: str) -> str:
    """Raises ConfigError: the file cannot be read, or is no text in UTF-8."""
    try:
        return read_file(path, flag).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag}: {path} is not UTF-8: {error}.") from None


def _given(options: SamplingOptions | AnswerOptions, **more: object) -> dict[str, object]:
    values = {field.name: getattr(options, field.name) for field in fields(options)} | more
    return {name: value for name, value in values.items() if value is not None}


def bytes_of(flag: str, given: int | str) -> int:
    """Raises ConfigError: the amount is none."""
    if given in (0, "0"):
        return 0
    try:
        return parse_bytes(str(given))
    except ValueError as error:
        raise ConfigError(f"{flag} {error}, got {given!r}.") from None
