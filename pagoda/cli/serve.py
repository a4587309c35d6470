"""`pagoda serve`: a model behind the OpenAI API."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from pagoda.api.answer_log import log_answer
from pagoda.api.keys import ApiKeys
from pagoda.api.server import ProfileConfig, ServerConfig
from pagoda.api.server import serve as serve_api
from pagoda.checkpoints.fingerprint import model_digest
from pagoda.checkpoints.resolve import ModelFiles
from pagoda.cli import event_loop, output
from pagoda.cli.options import (
    EngineOptions,
    ExecutorOptions,
    GeneralOptions,
    ParallelOptions,
    Seconds,
)
from pagoda.cli.server_process import READY_PREFIX
from pagoda.cli.sizes import format_bytes
from pagoda.engine.config import KVTiersConfig
from pagoda.errors import ConfigError
from pagoda.frontend.discovery.addresses import Advertised
from pagoda.frontend.discovery.flags import registering
from pagoda.frontend.fleet import (
    EngineFleet,
    Fleet,
    JoinConfig,
    JoinedFleet,
    read_cluster_key,
)
from pagoda.frontend.handoff_options import HandoffOptions
from pagoda.frontend.model_text import load_text
from pagoda.frontend.request_spans import RequestSpans
from pagoda.frontend.request_tracker import RequestTracker
from pagoda.ipc.lifeline import hold_lifeline
from pagoda.messages.frontend import EngineReady
from pagoda.messages.worker_config import CurveKeys, Role
from pagoda.telemetry.tracer import LEVELS, Tracer
from pagoda.version import __version__


@Parameter(name="*", group=Group("Server", sort_key=5))
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The address and the behaviour of the API."""

    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 is every one of this machine."""
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 8000
    """The port to listen on; 0 takes a free one."""
    served_model_name: str | None = None
    """The model's name in the API; by default the name given here."""
    api_key: Annotated[
        tuple[str, ...], Parameter(metavar="[NAME:=]KEY", negative=(), show_default=False)
    ] = ()
    """Refuse requests without this bearer token; may be repeated. Metrics and logs tell keys apart by NAME."""
    chat_template: Path | None = None
    """A Jinja file that replaces the model's chat template."""
    otlp_endpoint: Annotated[str | None, Parameter(metavar="URL")] = None
    """Export a span of each answer to this OpenTelemetry collector, such as http://localhost:4318."""
    drain_timeout: Seconds = 30.0
    """Seconds that running requests may take to finish after SIGTERM or Ctrl-C."""
    allowed_hosts: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    """A further Host header to answer to when listening on this machine only; may be repeated."""

    def spans(self, files: ModelFiles) -> RequestSpans | None:
        """None if they are not asked for.

        Raises:
            ConfigError: they cannot be exported.
        """
        if self.otlp_endpoint is None:
            return None
        return RequestSpans(self.otlp_endpoint, self.served_model_name or files.served_name)

    def config(self) -> ServerConfig:
        return ServerConfig(
            host=self.host,
            port=self.port,
            served_model_name=self.served_model_name,
            api_keys=ApiKeys(self.api_key),
            chat_template=self.chat_template,
            drain_timeout_s=self.drain_timeout,
            allowed_hosts=self.allowed_hosts,
        )


@Parameter(name="*", group=Group("Routers above", sort_key=25))
@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Routers that this server works for, besides its own API."""

    join: Annotated[str | None, Parameter(metavar="HOST:PORT,...|etcd://HOST:PORT/PREFIX")] = None
    """Routers (pagoda route) that may send requests here, or an etcd in which they look for hosts."""
    cluster_key_file: Path | None = None
    """A file with a secret that hosts and routers have in common."""
    advertise: Annotated[str, Parameter(metavar="HOST[:PORT]")] = "127.0.0.1"
    """The address of this machine at which routers reach it; without a port a free one is taken."""

    def config(self, files: ModelFiles, spans: RequestSpans | None) -> JoinConfig | None:
        """None if no router is served. `spans` are made of the answers to routers.

        Raises:
            ConfigError: a flag lacks another, or says what is not possible.
        """
        advertised = Advertised.parse(self.advertise)
        if self.join is None and advertised.port is None:
            return None
        tracker = RequestTracker()
        tracker.subscribe(on_finish=log_answer)
        if spans is not None:
            spans.follow(tracker)
        keys = self.keys("--join" if self.join is not None else "--advertise with a port")
        return JoinConfig(
            register=registering(self.join, keys),
            keys=keys,
            advertised=advertised,
            model=files.served_name,
            model_digest=model_digest(files),
            tracker=tracker,
        )

    def keys(self, user: str) -> CurveKeys:
        """
        Raises:
            ConfigError: there is no --cluster-key-file, which `user` needs, or it is no secret.
        """
        if self.cluster_key_file is None:
            raise ConfigError(
                f"{user} needs --cluster-key-file, a file that all hosts and routers are given."
            )
        return read_cluster_key(self.cluster_key_file)


@Parameter(name="*", group=Group("Traces", sort_key=80))
@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Traces of all processes of the server."""

    profile: Literal["e2e", "kernel", "verbose"] | None = None
    """Trace from the start: requests and steps, the operations of each step as well, or each token too."""
    profile_dir: Path = Path("pagoda-trace")
    """The directory of traces, also of those that POST /profile/start begins."""

    def config(self) -> ProfileConfig:
        return ProfileConfig(
            directory=self.profile_dir,
            level=None if self.profile is None else LEVELS[self.profile],
        )


_SERVER = ServerOptions()
_JOIN = JoinOptions()
_HANDOFF = HandoffOptions()
_ENGINE = EngineOptions()
_PARALLEL = ParallelOptions()
_EXECUTOR = ExecutorOptions()
_PROFILE = ProfileOptions()
_GENERAL = GeneralOptions()


def serve(
    model: str | None = None,
    *,
    server: ServerOptions = _SERVER,
    engine: EngineOptions = _ENGINE,
    parallel: ParallelOptions = _PARALLEL,
    executor: ExecutorOptions = _EXECUTOR,
    join: JoinOptions = _JOIN,
    handoff: HandoffOptions = _HANDOFF,
    profile: ProfileOptions = _PROFILE,
    general: GeneralOptions = _GENERAL,
) -> int:
    """Serve a model over the OpenAI API until SIGTERM or Ctrl-C.

    Args:
        model: A model directory, a GGUF file, a hub id, or a preset with --load-format dummy; by default
            the embedded pagoda-tiny.
    """
    hold_lifeline()
    general.apply(default_level="info")
    started = time.perf_counter()
    files = executor.resolve(engine, model, parallel)
    config = server.config()
    handed = handoff.config(
        cluster_key_file=join.cluster_key_file,
        advertise=Advertised.parse(join.advertise).host,
        num_replicas=parallel.data_parallel_size,
    )
    engine_config = executor.engine_config(engine, files.model, parallel, handed)

    spans = server.spans(files)
    joined = join.config(files, spans)
    if joined is None and join.cluster_key_file is not None and handed is None:
        raise ConfigError("--cluster-key-file needs --join, --role, or --advertise with a port.")

    tracer = Tracer("frontend")

    def make_fleet() -> Fleet:
        engines = EngineFleet(engine_config, parallel.data_parallel_policy, tracer)
        return engines if joined is None else JoinedFleet(engines, joined, tracer)

    def on_ready(url: str, limits: EngineReady) -> None:
        announce(url, config, files, engine_config.kv_tiers, limits, time.perf_counter() - started)

    event_loop.run(
        serve_api(
            config,
            make_fleet,
            partial(
                load_text,
                files,
                simulated=engine_config.executor == "sim",
                chat_template=server.chat_template,
            ),
            model_name=files.served_name,
            on_ready=on_ready,
            profile=profile.config(),
            tracer=tracer,
            spans=spans,
            further_trackers=() if joined is None else [joined.tracker],
        )
    )
    return 0


def announce(
    url: str,
    server: ServerConfig,
    files: ModelFiles,
    tiers: KVTiersConfig | None,
    limits: EngineReady,
    seconds: float,
) -> None:
    """Tells the operator what is served, where, and how to ask it."""
    console = output.stdout()
    name = server.served_model_name or files.served_name
    console.print(output.facts([*_facts(name, files, tiers, limits), *_keys(server)]))
    console.print(f"{READY_PREFIX}{url}  (after {seconds:.1f} s; Ctrl-C stops)", soft_wrap=True)
    console.print(f"\n{curl_line(url, name, asks_for_key=bool(server.api_keys))}\n", soft_wrap=True)
    sys.stdout.flush()


def _facts(
    name: str, files: ModelFiles, tiers: KVTiersConfig | None, limits: EngineReady
) -> Iterator[tuple[str, str]]:
    cached = limits.num_blocks * limits.block_size
    yield "pagoda", __version__
    yield "model", name if name == files.model else f"{name}  ({files.model})"
    yield "worker", limits.summary
    if limits.role is not Role.NONE:
        yield "role", limits.role.value
    yield "KV cache", f"{cached:,} tokens in {limits.num_blocks:,} blocks of {limits.block_size}"
    if tiers is not None:
        yield "KV tiers", ", ".join(_tiers(tiers))
    yield (
        "limits",
        f"{limits.max_model_len:,} tokens a request, {limits.max_num_seqs} requests at once, "
        f"{limits.max_num_waiting:,} waiting",
    )


def _keys(server: ServerConfig) -> Iterator[tuple[str, str]]:
    """The names of the API keys, so that a mistake in them is seen at once."""
    if server.api_keys:
        yield "API keys", ", ".join(server.api_keys.names)


def _tiers(tiers: KVTiersConfig) -> Iterator[str]:
    if tiers.host_bytes:
        yield f"{format_bytes(tiers.host_bytes)} of host memory"
    if tiers.disk_path is not None:
        yield f"{format_bytes(tiers.disk_bytes)} in {tiers.disk_path}"


def curl_line(url: str, model: str, *, asks_for_key: bool) -> str:
    """A command that asks the server one question."""
    body = {"model": model, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
    key = ' -H "Authorization: Bearer $PAGODA_API_KEY"' if asks_for_key else ""
    data = shlex.quote(json.dumps(body))
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {data}"
