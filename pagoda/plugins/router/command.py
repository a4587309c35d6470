# SPDX-License-Identifier: Apache-2.0
"""`pagoda route`: one API over several hosts."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from pagoda.api.catalogue import NamedModel
from pagoda.checkpoints.adapters import MAX_RANK
from pagoda.checkpoints.card import read_card
from pagoda.checkpoints.fingerprint import model_digest
from pagoda.checkpoints.resolve import ModelFiles, resolve_model
from pagoda.cli.cluster import ClusterOptions
from pagoda.cli.options import Count, GeneralOptions, ProfileOptions, Seconds
from pagoda.cli.plugin_flags import PluginOptions
from pagoda.cli.serve import ServerOptions, run_server
from pagoda.errors import ConfigError
from pagoda.faults.injector import Faults, plan_of
from pagoda.fleet.adapters import AdapterRegistry, parse_adapters
from pagoda.fleet.dispatcher import DEFAULT_NO_REPLICA_TIMEOUT_S
from pagoda.fleet.fleet import Fleet
from pagoda.fleet.policies import DEFAULT_POLICY, PolicyName
from pagoda.ipc.lifeline import hold_lifeline
from pagoda.ipc.tls import TlsFiles
from pagoda.messages.frontend import PoolModel
from pagoda.messages.worker_config import CurveKeys, WorkerConfig
from pagoda.plugins.router.discovery.base import Discover
from pagoda.plugins.router.discovery.choice import discovering
from pagoda.plugins.router.flags import JoinFlags
from pagoda.plugins.router.members import HostMembers, RouterConfig
from pagoda.plugins.router.pools import PoolConfig
from pagoda.plugins.router.pools_file import PoolSpec, read_pools
from pagoda.plugins.router.prefill_decode import DEFAULT_MIN_TOKENS
from pagoda.plugins.router.recording import TRACE_BLOCK, Recorder
from pagoda.telemetry.tracer import Tracer

_JOIN_LISTEN = "127.0.0.1:5600"


@Parameter(name="*", group=Group("Router", sort_key=10))
@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """The hosts of a router, and the choice among them."""

    join_listen: Annotated[str | None, Parameter(metavar="HOST:PORT")] = None
    """The address at which hosts join with --join; port 0 takes a free one; by default 127.0.0.1:5600."""
    discovery: Annotated[str | None, Parameter(metavar="FILE|etcd[s]://HOST:PORT/PREFIX")] = None
    """Find hosts elsewhere: in a file with one HOST:PORT a line, or in an etcd that hosts join."""
    policy: PolicyName = DEFAULT_POLICY
    """The rule that chooses a host for each request; see --data-parallel-policy of pagoda serve."""
    remote_prefill_min_tokens: Count = DEFAULT_MIN_TOKENS
    """Prompts of at least this many tokens, without the tokens believed to be cached, go to prefill hosts."""
    lora: Annotated[
        tuple[str, ...], Parameter(metavar="NAME=DIR", negative=(), show_default=False)
    ] = ()
    """An adapter that all hosts have, here for its name and digest; may be repeated."""
    pools: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Serve several models, as a YAML file says: pools of hosts, and what goes for each of them."""
    no_replica_timeout: Seconds = DEFAULT_NO_REPLICA_TIMEOUT_S
    """Seconds that a request waits while no host takes requests; then it is refused with 503."""
    record: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Write down when requests came, their lengths and which began alike, but no text, for pagoda simulate."""
    record_block_size: Annotated[int, Parameter(validator=Number(gte=16))] = TRACE_BLOCK
    """Tokens of a prompt by which beginnings are compared there."""

    @property
    def pool(self) -> PoolConfig:
        """The rules of the only pool, of a model that is not known yet."""
        return PoolConfig(
            policy=self.policy,
            remote_prefill_min_tokens=self.remote_prefill_min_tokens,
            no_replica_timeout_s=self.no_replica_timeout,
        )

    def check_pools(self, model: str | None, server: ServerOptions) -> None:
        """Raises ConfigError: a flag says of one model what --pools says of each."""
        own, given = RouterOptions(), {"MODEL": model is not None}
        given |= {
            f"--{name.replace('_', '-')}": getattr(self, name) != getattr(own, name)
            for name in ("policy", "remote_prefill_min_tokens", "lora", "no_replica_timeout")
        }
        given |= {
            "--served-model-name": bool(server.served_model_name),
            "--chat-template": server.chat_template is not None,
        }
        for flag, is_given in given.items():
            if is_given:
                raise ConfigError(f"{flag} and --pools exclude each other; say it of each pool.")

    def recorder(self) -> Recorder | None:
        return None if self.record is None else Recorder(self.record, self.record_block_size)

    def discover(self, keys: CurveKeys, etcd_files: TlsFiles) -> Discover:
        """Raises ConfigError if the flags name no way to find hosts."""
        if self.discovery is not None and self.join_listen is not None:
            raise ConfigError("--discovery and --join-listen exclude each other.")
        return discovering(self.discovery, self.join_listen or _JOIN_LISTEN, keys, etcd_files)


def route(
    model: str | None = None,
    *,
    router: RouterOptions = RouterOptions(),
    cluster: ClusterOptions = ClusterOptions(),
    server: ServerOptions = ServerOptions(),
    profile: ProfileOptions = ProfileOptions(),
    plugins: PluginOptions = PluginOptions(),
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Serve a model over the APIs of OpenAI, Anthropic and Ollama with several hosts, until SIGTERM or Ctrl-C.

    Args:
        model: The hosts' model, for its tokenizer and chat template; by default the embedded pagoda-tiny.
    """
    hold_lifeline()
    general.apply(default_level="info")
    started = time.perf_counter()
    keys = cluster.keys("pagoda route")
    flags: JoinFlags = plugins.router
    discover = router.discover(keys, flags.etcd_files)
    named: list[NamedModel] = []
    splits: Mapping[str, Mapping[str, float]] = {}
    if router.pools is None:
        pools = {"": _served(model, router.lora, router.pool)}
        server.check_adapters(list(pools[""].adapters), pools[""].files)
    else:
        router.check_pools(model, server)
        file = read_pools(router.pools)
        pools = {name: _pool_of(name, spec) for name, spec in file.pools.items()}
        named = [_named(name, spec, pools[name], server) for name, spec in file.pools.items()]
        splits = file.models
    configs = {name: pool.config for name, pool in pools.items()}
    routed = RouterConfig(discover, keys, configs, flags.region, router.recorder())
    first = next(iter(pools.values()))
    tracer = Tracer("router")
    faults = Faults(plan_of(os.environ))
    return run_server(
        first.files,
        lambda entrance: Fleet(
            HostMembers(routed, tracer),
            entrance=entrance,
            tracer=tracer,
            adapters=first.adapters,
            faults=faults,
        ),
        tracer,
        started,
        (server, cluster, profile, plugins),
        models=named,
        splits=splits,
        offered=tuple(PoolModel("", m.name, pools[m.name].config.model_digest) for m in named),
    )


@dataclass(frozen=True)
class _ServedPool:
    files: ModelFiles
    config: PoolConfig
    adapters: AdapterRegistry


def _served(model: str | None, lora: Sequence[str], config: PoolConfig) -> _ServedPool:
    """A pool of a model, with the rules of `config`. Raises ConfigError: a file cannot be used."""
    files = resolve_model(model)
    adapters = parse_adapters(lora, files.model, "auto", MAX_RANK)
    known = AdapterRegistry(WorkerConfig(model=files.model, adapters=adapters))
    digest = model_digest(files)
    return _ServedPool(files, replace(config, model=files.served_name, model_digest=digest), known)


def _named(name: str, spec: PoolSpec, pool: _ServedPool, server: ServerOptions) -> NamedModel:
    template = None if spec.chat_template is None else Path(spec.chat_template)
    return NamedModel(
        name,
        partial(server.load_text, pool.files, template),
        cache(partial(read_card, pool.files)),
        spec.aliases,
        pool.adapters,
        spec.fallback,
        None if spec.keys is None else frozenset(spec.keys),
        spec.request_timeout,
        spec.least_priority,
    )


def _pool_of(name: str, spec: PoolSpec) -> _ServedPool:
    """A pool of --pools. Raises ConfigError: its model or an adapter cannot be used."""
    config = PoolConfig(
        policy=spec.policy,
        remote_prefill_min_tokens=spec.remote_prefill_min_tokens,
        no_replica_timeout_s=spec.no_replica_timeout,
        distance=spec.distance,
        max_requests=spec.max_requests,
    )
    try:
        return _served(spec.model, [f"{it}={path}" for it, path in spec.adapters.items()], config)
    except ConfigError as error:
        raise ConfigError(f"--pools: pool {name!r}: {error}") from None
