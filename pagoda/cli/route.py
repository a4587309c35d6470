"""`pagoda route`: one API over hosts that join."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from pagoda.api.server import serve as serve_api
from pagoda.cli import event_loop
from pagoda.cli.options import Count, GeneralOptions
from pagoda.cli.serve import ServerOptions, announce
from pagoda.engine.messages import EngineReady
from pagoda.frontend.fleet import RoutedFleet, RouterConfig, parse_address, read_cluster_key
from pagoda.frontend.model_text import load_text
from pagoda.frontend.pods import DEFAULT_MIN_TOKENS
from pagoda.frontend.policies import DEFAULT_POLICY, PolicyName
from pagoda.ipc.lifeline import hold_lifeline
from pagoda.models.fingerprint import model_digest
from pagoda.models.resolve import resolve_model


@Parameter(name="*", group=Group("Router", sort_key=10))
@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """Who may join, and who takes a request."""

    join_listen: Annotated[str, Parameter(metavar="HOST:PORT")] = "127.0.0.1:5600"
    """Where hosts join with --join; port 0 takes a free one."""
    cluster_key_file: Path
    """A file with a secret that hosts and routers have in common."""
    policy: PolicyName = DEFAULT_POLICY
    """Which host takes a request, as --data-parallel-policy says it of replicas."""
    remote_prefill_min_tokens: Count = DEFAULT_MIN_TOKENS
    """Tokens of a prompt, without those believed to be cached, from which on prefill hosts compute it."""


_SERVER = ServerOptions()
_GENERAL = GeneralOptions()


def route(
    model: str | None = None,
    *,
    router: RouterOptions,
    server: ServerOptions = _SERVER,
    general: GeneralOptions = _GENERAL,
) -> int:
    """Serve a model over the OpenAI API with the hosts that join, until SIGTERM or Ctrl-C.

    Args:
        model: As the hosts have it, for its tokenizer and chat template; by default the embedded pagoda-tiny.
    """
    hold_lifeline()
    general.apply(default_level="info")
    started = time.perf_counter()
    files = resolve_model(model)
    config = server.config()
    fleet = RouterConfig(
        listen=parse_address(router.join_listen, "--join-listen"),
        keys=read_cluster_key(router.cluster_key_file),
        model=files.served_name,
        model_digest=model_digest(files),
        policy=router.policy,
        remote_prefill_min_tokens=router.remote_prefill_min_tokens,
    )

    def on_ready(url: str, limits: EngineReady) -> None:
        announce(url, config, files, None, limits, time.perf_counter() - started)

    event_loop.run(
        serve_api(
            config,
            partial(RoutedFleet, fleet),
            partial(load_text, files, simulated=False, chat_template=server.chat_template),
            model_name=files.served_name,
            on_ready=on_ready,
        )
    )
    return 0
