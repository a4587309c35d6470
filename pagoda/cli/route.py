"""`pagoda route`: one API over several hosts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import msgspec
from cyclopts import Group, Parameter

from pagoda.api.server import serve as serve_api
from pagoda.checkpoints.fingerprint import model_digest
from pagoda.checkpoints.resolve import resolve_model
from pagoda.cli import event_loop
from pagoda.cli.options import Count, GeneralOptions
from pagoda.cli.serve import JoinOptions, ProfileOptions, ServerOptions, announce
from pagoda.errors import ConfigError
from pagoda.frontend.discovery.base import Discover
from pagoda.frontend.discovery.flags import discovering
from pagoda.frontend.fleet import Fleet, JoinedFleet, RoutedFleet, RouterConfig
from pagoda.frontend.model_text import load_text
from pagoda.frontend.pods import DEFAULT_MIN_TOKENS
from pagoda.frontend.policies import DEFAULT_POLICY, PolicyName
from pagoda.ipc.lifeline import hold_lifeline
from pagoda.messages.frontend import EngineReady
from pagoda.messages.worker_config import CurveKeys, Role
from pagoda.telemetry.tracer import Tracer


@Parameter(name="*", group=Group("Router", sort_key=10))
@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """The hosts of a router, and the choice among them."""

    join_listen: Annotated[str | None, Parameter(metavar="HOST:PORT")] = None
    """The address at which hosts join with --join; port 0 takes a free one; by default 127.0.0.1:5600."""
    discovery: Annotated[str | None, Parameter(metavar="FILE|etcd://HOST:PORT/PREFIX")] = None
    """Look for hosts elsewhere: in a file with a HOST:PORT a line, or where they join an etcd."""
    policy: PolicyName = DEFAULT_POLICY
    """The rule that chooses a host for each request; see --data-parallel-policy of pagoda serve."""
    remote_prefill_min_tokens: Count = DEFAULT_MIN_TOKENS
    """Tokens of a prompt, without those believed to be cached, from which on prefill hosts compute it."""

    def discover(self, keys: CurveKeys) -> Discover:
        """
        Raises:
            ConfigError: it cannot be found out where hosts are.
        """
        if self.discovery is not None and self.join_listen is not None:
            raise ConfigError("--discovery and --join-listen exclude each other.")
        return discovering(self.discovery, self.join_listen or _JOIN_LISTEN, keys)


_JOIN_LISTEN = "127.0.0.1:5600"


_ROUTER = RouterOptions()
_JOIN = JoinOptions()
_SERVER = ServerOptions()
_PROFILE = ProfileOptions()
_GENERAL = GeneralOptions()


def route(
    model: str | None = None,
    *,
    router: RouterOptions = _ROUTER,
    join: JoinOptions = _JOIN,
    server: ServerOptions = _SERVER,
    profile: ProfileOptions = _PROFILE,
    general: GeneralOptions = _GENERAL,
) -> int:
    """Serve a model over the OpenAI API with several hosts, until SIGTERM or Ctrl-C.

    Args:
        model: As the hosts have it, for its tokenizer and chat template; by default the embedded pagoda-tiny.
    """
    hold_lifeline()
    general.apply(default_level="info")
    started = time.perf_counter()
    files = resolve_model(model)
    config = server.config()
    keys = join.keys("pagoda route")
    routed = RouterConfig(
        discover=router.discover(keys),
        keys=keys,
        model=files.served_name,
        model_digest=model_digest(files),
        policy=router.policy,
        remote_prefill_min_tokens=router.remote_prefill_min_tokens,
    )
    spans = server.spans(files)
    joined = join.config(files, spans)

    tracer = Tracer("router")

    def make_fleet() -> Fleet:
        fleet = RoutedFleet(routed, tracer)
        return fleet if joined is None else JoinedFleet(fleet, joined, tracer)

    def on_ready(url: str, limits: EngineReady) -> None:
        of_any_hosts = msgspec.structs.replace(limits, role=Role.NONE)  # others than the first come
        announce(url, config, files, None, of_any_hosts, time.perf_counter() - started)

    event_loop.run(
        serve_api(
            config,
            make_fleet,
            partial(load_text, files, simulated=False, chat_template=server.chat_template),
            model_name=files.served_name,
            on_ready=on_ready,
            profile=profile.config(),
            tracer=tracer,
            spans=spans,
            further_trackers=() if joined is None else [joined.tracker],
        )
    )
    return 0
