# SPDX-License-Identifier: Apache-2.0
"""The file of `--pools`: the models of a router, in YAML.

Each error names the file, the line, and the field.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from pagoda.errors import ConfigError
from pagoda.files import read_file
from pagoda.fleet.dispatcher import DEFAULT_NO_REPLICA_TIMEOUT_S
from pagoda.fleet.policies import DEFAULT_POLICY, PolicyName
from pagoda.ipc.clock import MAX_TIMEOUT_S
from pagoda.messages.frontend import MAX_POOLS
from pagoda.plugins.router.pools import NO_DISTANCE, Distance
from pagoda.plugins.router.prefill_decode import DEFAULT_MIN_TOKENS

_FLAG = "--pools"
_MOST_NESTED = 16
_STEP = re.compile(r"\.([^.\[\]`]+)|\[(\d+)\]")
"""One step of the path by which msgspec names a value."""

ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=1)]
_Share = Annotated[float, Meta(gt=0, le=1e9)]


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pool as the file describes it; each field but `model` has a default."""

    model: str
    aliases: tuple[ModelName, ...] = ()
    adapters: Mapping[ModelName, str] = {}
    """Directories of adapters that all hosts of the pool have, by the names of the adapters."""
    chat_template: str | None = None
    policy: PolicyName = DEFAULT_POLICY
    remote_prefill_min_tokens: Count = DEFAULT_MIN_TOKENS
    no_replica_timeout: Annotated[float, Meta(ge=0, le=MAX_TIMEOUT_S)] = (
        DEFAULT_NO_REPLICA_TIMEOUT_S
    )
    distance: Distance = NO_DISTANCE
    max_requests: Count | None = None
    request_timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None
    least_priority: Annotated[int, Meta(ge=-(2**31) + 1, lt=2**31)] | None = None
    keys: tuple[str, ...] | None = None
    fallback: tuple[ModelName, ...] = ()


Shares = Annotated[Mapping[ModelName, _Share], Meta(min_length=1)]


class _Sections(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pools: Annotated[Mapping[ModelName, Any], Meta(min_length=1, max_length=MAX_POOLS)]
    models: Mapping[ModelName, Any] = {}


@dataclass(frozen=True)
class PoolsFile:
    """The whole file."""

    pools: Mapping[str, PoolSpec]
    models: Mapping[str, Mapping[str, float]]
    """Further names, and the shares of their requests that pools get."""


def read_pools(path: Path) -> PoolsFile:
    """The pools that a file describes.
    Raises ConfigError: the file cannot be read, or says what cannot be; names file, line and field."""
    text = read_file(path, _FLAG)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_shape(path, root)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"{_FLAG} {path}{line}: this is not valid YAML.") from None

    def converted(value: object, kind: Any, *steps: str) -> Any:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            problem, _, place = str(error).partition(" - at `")
            below = [one or two for one, two in _STEP.findall(place)]
            raise ConfigError(_sentence(path, root, [*steps, *below], problem)) from None

    sections = converted(values, _Sections)
    pools, models = sections.pools.items(), sections.models.items()
    found = PoolsFile(
        {name: converted(pool, PoolSpec, "pools", name) for name, pool in pools},
        {name: converted(shares, Shares, "models", name) for name, shares in models},
    )
    for steps, problem in _problems(found):
        raise ConfigError(_sentence(path, root, steps, problem))
    return found


def _sentence(path: Path, root: Any, steps: list[str], problem: str) -> str:
    field = ".".join(steps) or "the file"
    return f"{_FLAG} {path}, line {_line_of(root, steps)}: {field}: {problem.rstrip('.')}."


def _line_of(node: Any, steps: list[str]) -> int:
    """The line of the value that the steps lead to, or of the last one on the way that is there."""
    line = 0
    for step in steps:
        entries: list[tuple[Any, Any]] = []
        if isinstance(node, yaml.MappingNode):
            entries = [pair for pair in node.value if pair[0].value == step]
        elif isinstance(node, yaml.SequenceNode):
            entries = [(node.value[int(step)], node.value[int(step)])] if step.isdigit() else []
        if not entries:
            break
        line, node = entries[0][0].start_mark.line, entries[0][1]
    return line + 1


def _check_shape(path: Path, root: Any) -> None:
    """Raises ConfigError: a name is there twice, of which YAML would drop one, or a node is an alias."""
    seen: set[int] = set()
    waiting = [(root, 0)] if root is not None else []
    while waiting:
        node, depth = waiting.pop()
        line = node.start_mark.line + 1
        if id(node) in seen or depth > _MOST_NESTED:
            raise ConfigError(f"{_FLAG} {path}, line {line}: write values out, without aliases.")
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key.value, str))
            for key, _ in node.value:
                if isinstance(key.value, str) and keys[key.value] > 1:
                    place = f"{_FLAG} {path}, line {key.start_mark.line + 1}"
                    raise ConfigError(f"{place}: {key.value!r} is there twice.")
            waiting += [(value, depth + 1) for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(value, depth + 1) for value in node.value]


def _problems(file: PoolsFile) -> Iterator[tuple[list[str], str]]:
    """Sentences about values that do not fit together, each with the steps to its place."""
    taken: dict[str, str] = dict.fromkeys(file.pools, "a pool")
    for name, pool in file.pools.items():
        where = ["pools", name]
        for index, alias in enumerate(pool.aliases):
            if alias in taken:
                yield [*where, "aliases", str(index)], f"{alias!r} is {taken[alias]} already"
            taken[alias] = "an alias"
        for adapter in pool.adapters:
            if adapter in taken:
                yield [*where, "adapters", adapter], f"{adapter!r} is {taken[adapter]} already"
            taken[adapter] = "an adapter"
        for index, other in enumerate(pool.fallback):
            if other == name or other not in file.pools:
                yield (
                    [*where, "fallback", str(index)],
                    f"{other!r} must be another pool of this file",
                )
    for name, shares in file.models.items():
        if name in taken:
            yield ["models", name], f"{name!r} is {taken[name]} already"
        for pool_name in shares:
            if pool_name not in file.pools:
                yield ["models", name, pool_name], f"{pool_name!r} must be a pool of this file"
