"""The arguments of `LLM` and `AsyncLLM`: the flags of `pagoda serve`, and neutral arguments of vLLM scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from cyclopts import Parameter

from pagoda.checkpoints.resolve import ModelFiles
from pagoda.engine.config import EngineConfig
from pagoda.errors import ConfigError
from pagoda.frontend.engine_options import EngineOptions, ExecutorOptions, ParallelOptions
from pagoda.frontend.policies import PolicyName

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

Options = type[EngineOptions] | type[ExecutorOptions] | type[ParallelOptions]


Configuration = tuple[ModelFiles, EngineConfig, PolicyName]
"""The files of a model, the configuration of each replica, and the policy that chooses a replica."""


def configure(model: str | None, arguments: Mapping[str, object]) -> Configuration:
    """The configuration that the arguments ask for.

    An argument is named like a field of `EngineOptions`, `ExecutorOptions` or `ParallelOptions`, or like another
    name of its flag.

    Raises:
        ConfigError: there is no such model or argument, or an argument has a value that is not allowed.
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
    engine = EngineOptions(**_fields_of(EngineOptions, given))
    executor = ExecutorOptions(**_fields_of(ExecutorOptions, given))
    parallel = ParallelOptions(**_fields_of(ParallelOptions, given))
    files = executor.resolve(engine, model, parallel)
    config = executor.engine_config(engine, files.model, parallel)
    return files, config, parallel.data_parallel_policy


def _known_names() -> dict[str, str]:
    return {**_names(EngineOptions), **_names(ExecutorOptions), **_names(ParallelOptions)}


def _names(options: Options) -> dict[str, str]:
    """The field that each argument sets, by all names that its flag has."""
    names = {field.name: field.name for field in fields(options)}
    for field, hint in get_type_hints(options, include_extras=True).items():
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, Parameter):
                names |= {_argument(flag): field for flag in extra.name or ()}
    return names


def _argument(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _fields_of(options: Options, given: Mapping[str, object]) -> dict[str, Any]:
    return {field.name: given[field.name] for field in fields(options) if field.name in given}


def _check_neutral(name: str, value: object, model: str | None) -> None:
    if name not in _NEUTRAL:
        known = ", ".join([*_known_names(), "chat_template"])
        raise ConfigError(f"LLM takes no argument {name!r}; it takes: {known}.")
    if name == "tokenizer" and value == model:
        return
    if value not in _NEUTRAL[name]:
        neutral = " or ".join(repr(same) for same in _NEUTRAL[name])
        raise ConfigError(f"LLM supports {name} only as {neutral}, got {value!r}.")
