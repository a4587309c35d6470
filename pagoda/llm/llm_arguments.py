# SPDX-License-Identifier: Apache-2.0
"""The arguments of `LLM` and `AsyncLLM`: the flags of `pagoda serve`, and neutral arguments of vLLM scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from cyclopts import Parameter

from pagoda.checkpoints.resolve import ModelFiles
from pagoda.errors import ConfigError
from pagoda.fleet.policies import PolicyName
from pagoda.llm.engine_options import EngineOptions, ExecutorOptions, ParallelOptions
from pagoda.messages.engine_config import EngineConfig

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "cpu_offload_gb": (0,),
    "disable_custom_all_reduce": (True, False),
    "disable_log_stats": (True, False),
    "download_dir": (None,),
    "enforce_eager": (True, False),
    "kv_cache_dtype": ("auto",),
    "max_logprobs": (20,),
    "revision": (None,),
    "swap_space": (0, 4),
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
    "trust_remote_code": (False,),
}
"""Arguments of vLLM's `LLM` that are accepted with values that change nothing."""

T = TypeVar("T")

Configuration = tuple[ModelFiles, EngineConfig, PolicyName]
"""The files of a model, the configuration of each replica, and the policy that chooses a replica."""


def configure(model: str | None, arguments: Mapping[str, object]) -> Configuration:
    """The configuration that the arguments ask for.

    An argument is named like a field of `EngineOptions`, `ExecutorOptions` or `ParallelOptions`, or like another
    name of its flag.

    Raises ConfigError: there is no such model or argument, or an argument has a value that is not allowed.
    """
    known = _known_names()
    given: dict[str, object] = {}
    for name, value in arguments.items():
        if name not in known:
            _check_neutral(name, value, model)
        elif known[name] in given:
            raise ConfigError(f"LLM was given {known[name]} under two names.")
        else:
            given[known[name]] = value
    engine, executor = _made(EngineOptions, given), _made(ExecutorOptions, given)
    parallel = _made(ParallelOptions, given)
    files = executor.resolve(engine, model, parallel)
    config = executor.engine_config(engine, files.model, parallel)
    return files, config, parallel.data_parallel_policy


def _known_names() -> dict[str, str]:
    """The field that each argument sets, by all names that its flag has."""
    names: dict[str, str] = {}
    for options in (EngineOptions, ExecutorOptions, ParallelOptions):
        names |= {field.name: field.name for field in fields(options)}
        for field, hint in get_type_hints(options, include_extras=True).items():
            for extra in getattr(hint, "__metadata__", ()):
                flags = extra.name or () if isinstance(extra, Parameter) else ()
                names |= {flag.removeprefix("--").replace("-", "_"): field for flag in flags}
    return names


def _made(options: type[T], given: Mapping[str, Any]) -> T:
    names = get_type_hints(options)
    values = {name: value for name, value in given.items() if name in names}
    for name, value in values.items():
        if isinstance(value, Mapping):  # of a flag that takes JSON
            values[name] = json.dumps(value)
    return options(**values)


def _check_neutral(name: str, value: object, model: str | None) -> None:
    if name not in _NEUTRAL:
        known = ", ".join([*_known_names(), "chat_template"])
        raise ConfigError(f"LLM takes no argument {name!r}; it takes: {known}.")
    if name == "tokenizer" and value == model:
        return
    if value not in _NEUTRAL[name]:
        neutral = " or ".join(repr(same) for same in _NEUTRAL[name])
        raise ConfigError(f"LLM supports {name} only as {neutral}, got {value!r}.")
