# SPDX-License-Identifier: Apache-2.0
"""`pagoda route`: one API over several hosts."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from pagoda.checkpoints.adapters import MAX_RANK
from pagoda.checkpoints.fingerprint import model_digest
from pagoda.checkpoints.resolve import resolve_model
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
from pagoda.messages.worker_config import CurveKeys, WorkerConfig
from pagoda.plugins.router.discovery.base import Discover
from pagoda.plugins.router.discovery.choice import discovering
from pagoda.plugins.router.flags import JoinFlags
from pagoda.plugins.router.members import HostMembers, RouterConfig
from pagoda.plugins.router.prefill_decode import DEFAULT_MIN_TOKENS
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
    no_replica_timeout: Seconds = DEFAULT_NO_REPLICA_TIMEOUT_S
    """Seconds that a request waits while no host takes requests; then it is refused with 503."""

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
    files = resolve_model(model)
    keys = cluster.keys("pagoda route")
    flags: JoinFlags = plugins.router
    routed = RouterConfig(
        discover=router.discover(keys, flags.etcd_files),
        keys=keys,
        model=files.served_name,
        model_digest=model_digest(files),
        policy=router.policy,
        remote_prefill_min_tokens=router.remote_prefill_min_tokens,
        no_replica_timeout_s=router.no_replica_timeout,
    )
    adapters = parse_adapters(router.lora, files.model, "auto", MAX_RANK)
    server.check_adapters(adapters, files)
    known = AdapterRegistry(WorkerConfig(model=files.model, adapters=adapters))
    tracer = Tracer("router")
    options = (server, cluster, profile, plugins)
    faults = Faults(plan_of(os.environ))
    return run_server(
        files,
        lambda entrance: Fleet(
            HostMembers(routed, tracer),
            entrance=entrance,
            tracer=tracer,
            adapters=known,
            faults=faults,
        ),
        tracer,
        started,
        options,
    )
