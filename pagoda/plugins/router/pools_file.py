# SPDX-License-Identifier: Apache-2.0
"""The file of `--pools`: the models of a router, in YAML.

Each error names the file, the line, and the field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pagoda.cli.yaml_file import Place, YamlFile
from pagoda.fleet.dispatcher import DEFAULT_NO_REPLICA_TIMEOUT_S
from pagoda.fleet.policies import DEFAULT_POLICY, PolicyName
from pagoda.ipc.clock import MAX_TIMEOUT_S
from pagoda.messages.frontend import MAX_POOLS
from pagoda.plugins.router.pools import NO_DISTANCE, Distance
from pagoda.plugins.router.prefill_decode import DEFAULT_MIN_TOKENS

_FLAG = "--pools"

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


Shares = Annotated[dict[ModelName, _Share], Meta(min_length=1)]


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
    file = YamlFile(path, _FLAG)
    file.convert(file.value, _Sections)
    found = PoolsFile(file.section("pools", PoolSpec), file.section("models", Shares))
    for place, problem in _problems(found):
        raise file.error(place, f"{'.'.join(map(str, place))}: {problem}")
    return found


def _problems(file: PoolsFile) -> Iterator[tuple[Place, str]]:
    """Sentences about values that do not fit together, each with its place."""
    taken: dict[str, str] = dict.fromkeys(file.pools, "a pool")
    for name, pool in file.pools.items():
        where = ("pools", name)
        for index, alias in enumerate(pool.aliases):
            if alias in taken:
                yield (*where, "aliases", index), f"{alias!r} is {taken[alias]} already"
            taken[alias] = "an alias"
        for adapter in pool.adapters:
            if adapter in taken:
                yield (*where, "adapters", adapter), f"{adapter!r} is {taken[adapter]} already"
            taken[adapter] = "an adapter"
        for index, other in enumerate(pool.fallback):
            if other == name or other not in file.pools:
                yield (
                    (*where, "fallback", index),
                    f"{other!r} must be another pool of this file",
                )
    for name, shares in file.models.items():
        if name in taken:
            yield ("models", name), f"{name!r} is {taken[name]} already"
        for pool_name in shares:
            if pool_name not in file.pools:
                yield ("models", name, pool_name), f"{pool_name!r} must be a pool of this file"
