# SPDX-License-Identifier: Apache-2.0
"""Command lines of other servers, translated to that of `pagoda serve`.

The model is the embedded one or one that the caller chose, under the name that was asked for. Flags that say how
to compute, not what to answer, have no counterpart and are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TINY_LEN = 2048
"""The context of the embedded model."""
LARGEST_LEN = 8192
"""The longest context that a test gets from another model."""
_CHATML = Path(__file__).parent / "script" / "chatml.jinja"
"""The chat template of a model that is played, where a test names none."""
_NO_THOUGHTS = '{"enable_thinking": false}'


FORMATS = ("hermes", "llama3_json", "mistral", "granite", "pythonic")
"""Formats of tool calls that written answers are in."""
_SGLANG_FORMATS = {"llama3": "llama3_json", "lfm2": "pythonic"}
"""SGLang's names of such formats. LFM2 writes Python's calls between tokens of its own, which are left out."""


class NotApplicableError(Exception):
    """A server is asked for something that is no part of Pagoda; says what."""


@dataclass(frozen=True)
class Dialect:
    """The flags of one server."""

    model: Sequence[str]
    """Flags, or the empty string for the first positional argument, that name the model."""
    names: Sequence[str]
    """Flags that name the model in the API; the next arguments up to a flag are names."""
    taken: Mapping[str, str]
    """Flags with a value, and Pagoda's name for them."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """Flags without a value, and Pagoda's name for them; empty for flags without a counterpart."""
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    """Flags of what is no part of Pagoda, with what that is."""
    always: Sequence[str] = ()
    """Pagoda's flags for what this server does by default."""
    any_origin: bool = False
    """True if pages of any origin may use the server unless a flag says otherwise."""
    shares_context: bool = False
    """True if the requests that run at once share the context in equal parts."""
    short_len: int = 512
    """A test that asks for a shorter context is about its end."""


VLLM = Dialect(
    model=("", "--model"),
    names=("--served-model-name",),
    taken={
        "--port": "--port",
        "--host": "--host",
        "--api-key": "--api-key",
        "--root-path": "--root-path",
        "--max-model-len": "--max-model-len",
        "--max-num-seqs": "--max-num-seqs",
        "--max-logprobs": "--max-logprobs",
        "--chat-template": "--chat-template",
        "--default-chat-template-kwargs": "--default-chat-template-kwargs",
        "--data-parallel-size": "--data-parallel-size",
        "--lora-modules": "--lora",
        "--max-lora-rank": "--max-lora-rank",
        "--allow-lora-loading": "--allow-lora-loading",
    },
    switches={
        "--enable-force-include-usage": "--enable-force-include-usage",
        "--enforce-eager": "",
        "--enable-lora": "",
        "--enable-auto-tool-choice": "",
        "--trust-remote-code": "",
        "--disable-log-stats": "",
        "--disable-frontend-multiprocessing": "",
        "--enable-prefix-caching": "",
        "--no-enable-prefix-caching": "",
        "--enable-chunked-prefill": "",
        "--enable-prompt-tokens-details": "",
        "--enable-tokenizer-info-endpoint": "",
        "--enable-request-id-headers": "",
        "--enable-server-load-tracking": "",
        "--return-tokens-as-token-ids": "--return-tokens-as-token-ids",
        "--enable-prompt-embeds": "",
        "--enable-log-outputs": "",
        "--enable-log-requests": "",
    },
    not_applicable={
        "--uds": "a server on a Unix socket",
        "--enable-sleep-mode": "sleep mode",
        "--tokens-only": "a server of tokens without a tokenizer",
        "--skip-tokenizer-init": "a server without a tokenizer",
        "--speculative-config": "speculative decoding",
        "--middleware": "Python middleware of the operator",
        "--limit-mm-per-prompt": "images, audio and video",
        "--headless": "data parallelism over nodes",
        "--worker-extension-cls": "Python extensions of the operator",
    },
    always=("--vllm-metrics",),
)

_SILENT = (
    *("--offline", "--cont-batching", "--metrics", "--kv-unified", "--swa-full", "--slots"),
    *("--no-slots", "--verbose", "--jinja", "--no-jinja", "--no-mmproj", "--no-ui"),
    *("--no-cache-idle-slots", "--backend_sampling", "--no-models-autoload"),
    *("--embedding", "--reranking"),
)

LLAMA_CPP = Dialect(
    model=("--model", "--hf-repo", "--hf-file", "--model-url"),
    names=("--alias",),
    taken={
        "--port": "--port",
        "--host": "--host",
        "--api-key": "--api-key",
        "--ctx-size": "--max-model-len",
        "--parallel": "--max-num-seqs",
        "--cors-origins": "--cors-origins",
        "--chat-template-file": "--chat-template",
    },
    switches=dict.fromkeys(_SILENT, ""),
    not_applicable={
        "--mmproj-url": "images and audio",
        "--media-path": "images and audio",
        "--model-draft": "a draft model for speculative decoding",
        "--spec-type": "speculative decoding",
        "--models-dir": "a router over the models of a directory",
        "--models-preset": "a router over presets of models",
        "--models-max": "a router over models that it loads and unloads",
        "--lora": "adapters of a model that is not here",
        "--slot-save-path": "slots that are saved to files",
        "--sleep-idle-seconds": "sleep",
        "--ui-mcp-proxy": "a proxy for the page",
        "--tools": "tools that the server runs",
        "--mcp-servers-config": "MCP servers that the server starts",
        "--mcp-servers-json": "MCP servers that the server starts",
        "--context-shift": "a context that forgets its beginning",
    },
    always=("--any-model-name",),
    any_origin=True,
    shares_context=True,
)


_SGLANG_SILENT = (
    *("--enable-cache-report", "--trust-remote-code", "--disable-cuda-graph", "--enable-metrics"),
    *("--constrained-json-disable-any-whitespace", "--skip-server-warmup"),
)

SGLANG = Dialect(
    model=("--model-path", "--model"),
    names=("--served-model-name",),
    taken={
        "--port": "--port",
        "--host": "--host",
        "--api-key": "--api-key",
        "--context-length": "--max-model-len",
        "--max-running-requests": "--max-num-seqs",
        "--reasoning-parser": "--reasoning-parser",
    },
    switches=dict.fromkeys(_SGLANG_SILENT, ""),
    not_applicable={
        "--enable-return-hidden-states": "hidden states",
        "--is-embedding": "a pooling model that is not here",
        "--enable-http2": "HTTP/2",
        "--uds": "a server on a Unix socket",
        "--speculative-algorithm": "speculative decoding",
        "--enable-multimodal": "images, audio and video",
        "--enable-custom-logit-processor": "Python code of clients",
    },
    always=("--any-model-name",),
    short_len=1024,
)


def translate(
    arguments: Sequence[str], dialect: Dialect, max_len: int, *, scripted: bool = False
) -> list[str]:
    """The arguments of `pagoda serve` with a model of `max_len` tokens of context.

    A model that is `scripted` writes tool calls as those would that tests name templates and parsers of.

    Raises NotApplicableError: as its text says.
    """
    found: list[str] = list(dialect.always)
    names: list[str] = []
    model = ""
    parts = _shares(arguments) if dialect.shares_context else 1
    position = 0
    while position < len(arguments):
        flag, has_value, value = arguments[position].partition("=")
        position += 1
        if not flag.startswith("-"):
            model = model or flag
            continue
        if flag in dialect.not_applicable:
            raise NotApplicableError(dialect.not_applicable[flag])
        if flag in dialect.switches:
            found += [dialect.switches[flag]] if dialect.switches[flag] else []
            continue
        values = [value] if has_value else []
        while not has_value and position < len(arguments) and not _is_flag(arguments[position]):
            values.append(arguments[position])
            position += 1
        if flag in dialect.names:
            names += values
        elif flag in dialect.model:
            model = model or values[0]
        elif flag == "--reasoning":
            found += ["--default-chat-template-kwargs", _NO_THOUGHTS] if values == ["off"] else []
        elif scripted and flag == "--tool-call-parser":
            found += [flag, call_format(values[0])]
        elif flag in dialect.taken and values:
            lengths = (dialect.short_len, max_len)
            found += _bounded(dialect.taken[flag], values, lengths, parts, scripted=scripted)
    if scripted and any(it.endswith("-parser") for it in found) and "--chat-template" not in found:
        found += ["--chat-template", str(_CHATML)]
    if dialect.any_origin and "--cors-origins" not in arguments:
        found += ["--cors-origins", "*"]
    if not any(it.startswith("--reasoning") for it in arguments):
        # These servers find reasoning only if they are told to; a grammar then begins with the answer.
        found += ["--reasoning-parser", "none"]
    for name in names or [model]:
        found += ["--served-model-name", name] if name else []
    return found


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and not argument.lstrip("-")[:1].isdigit()


def call_format(parser: str) -> str:
    """The format of tool calls in which a model with this parser is played."""
    name = _SGLANG_FORMATS.get(parser, parser)
    return name if name in FORMATS else "hermes"


def _shares(arguments: Sequence[str]) -> int:
    """The requests that share the context of llama.cpp."""
    if "--parallel" not in arguments or "--kv-unified" in arguments:
        return 1
    return int(arguments[arguments.index("--parallel") + 1])


def _bounded(
    flag: str, values: Sequence[str], lengths: tuple[int, int], parts: int, *, scripted: bool
) -> list[str]:
    """A flag as Pagoda can take it with the model; `parts` requests share the context.

    `lengths` are the context below which a test is about its end, and that of the model.
    """
    short_len, max_len = lengths
    if flag == "--max-model-len":
        # A text takes several times as many tokens of the embedded model as of those that the tests are made for.
        asked = int(values[0]) // parts
        return [flag, str(asked if asked < short_len else max_len)]
    if flag == "--chat-template" and "tool_chat_template" in values[0] and not scripted:
        return []  # of a model that calls tools in another way
    if flag == "--lora":
        return [part for value in values for part in (flag, _named_adapter(value))]
    if flag == "--max-num-seqs":
        return [flag, str(min(int(values[0]), 64))]
    return [part for value in values for part in (flag, value)]


def _named_adapter(value: str) -> str:
    """`NAME=DIR`, of that or of JSON with name and path."""
    if not value.startswith("{"):
        return value
    fields = json.loads(value)
    return f"{fields['name']}={fields['path']}"
