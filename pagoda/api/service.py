# SPDX-License-Identifier: Apache-2.0
"""The state that all routes share: the model that is served, and whether new work is accepted."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from pagoda.api.answers.answer_log import log_answer
from pagoda.api.auth.key_limits import KeyLimits
from pagoda.api.auth.keys import NO_KEYS, ApiKeys
from pagoda.api.bodies.ignored_fields import IgnoredNames
from pagoda.api.catalogue import Catalogue, NamedModel, ServedModel
from pagoda.api.errors import ApiError, unavailable
from pagoda.api.handoffs import Handoffs, NoHandoffs
from pagoda.api.http.allowed_hosts import ANY_HOST, AllowedHosts
from pagoda.api.http.connections import UNLIMITED
from pagoda.api.http.cors import NO_ORIGINS, CorsOrigins
from pagoda.api.monitoring.request_metrics import RequestMetrics
from pagoda.api.openai.chat_store import ChatStore
from pagoda.checkpoints.card import ModelCard
from pagoda.concurrency.async_utils import LongWork
from pagoda.fleet.endpoint import Health
from pagoda.fleet.fleet import Fleet
from pagoda.fleet.trace_control import TraceControl
from pagoda.messages.adapters import Adapter
from pagoda.messages.load import LoadReport
from pagoda.telemetry.request_tracker import ClientRequest, RequestTracker
from pagoda.text.text_generator import TextGenerator

T = TypeVar("T")

_NUM_BODY_THREADS = 2
_MAX_WAITING_FOR_MODEL = 1024
"""Requests that wait for the model at once: of each, what the socket's buffers take of its body is in memory."""


@dataclass(frozen=True)
class ApiConfig:
    served_model_name: str
    read_card: Callable[[], ModelCard] = ModelCard
    """Reads what a list of models tells of the model; may take a second."""
    model_aliases: Sequence[str] = ()
    """Further names under which the model is asked for; answers have the first name."""
    any_model_name: bool = False
    """Names that are neither the model's nor those of adapters mean the model, too."""
    api_keys: ApiKeys = NO_KEYS
    """Every route but those of `/health` and the page needs one of these keys, if there are any."""
    allowed_hosts: AllowedHosts = ANY_HOST
    cors_origins: CorsOrigins = NO_ORIGINS
    root_path: str = ""
    """A path before all routes, under which a proxy shows the server; routes without it are answered, too."""
    ignored_names: IgnoredNames = field(default_factory=IgnoredNames)
    """Fields of bodies that were ignored."""
    client_tls: ssl.SSLContext | None = None
    """Certificates by which other servers are asked; None asks them by plain HTTP."""
    always_usage: bool = False
    """Events of streams have their usage so far if the client has no `stream_options`, and streams end with it."""
    tells_drafts: bool = False
    """Answers tell what became of their drafts."""
    tokens_as_ids: bool = False
    """Tokens of log-probabilities are written as `token_id:7` unless the client says otherwise."""
    vllm_metrics: bool = False
    """`/metrics` has vLLM's names, too."""
    max_body_bytes: int = 8 * 2**20
    body_timeout_s: float = 60.0
    keep_alive_s: float = 15.0
    """Seconds after which an idle event stream gets a comment."""
    response_store_bytes: int = 256 * 2**20
    """Bytes of responses that are kept for `previous_response_id` and for retrieval, and as many of conversations;
    0 keeps none."""
    hold_while_loading_s: float = 0.0
    """Seconds for which requests that need the model wait for it while it loads, before their bodies are read."""
    request_timeout_s: float | None = None
    """Seconds after which a request ends whose client gives it no time of its own; None for none."""
    stall_timeout_s: float = 60.0
    """Seconds after which a client that reads nothing of an answer is cut off."""
    models: Sequence[NamedModel] = ()
    """The models of a server of several, of which the first has the names above; empty if it has one."""
    splits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Further names, and the shares of their requests that several of `models` get."""
    max_connections: int = UNLIMITED
    """Open connections; at the limit those that wait longest for a request are closed."""
    options: Mapping[type[Any], Any] = field(default_factory=dict)
    """Values that flags of plugins name, by type."""

    def option(self, kind: type[T]) -> T | None:
        """Value that a plugin's flags name; None without such flags."""
        return cast(T | None, self.options.get(kind))


class PluginState(Protocol):
    """State of a plugin while a server runs."""

    def start(self) -> None:
        """Begins to work: the model is loaded."""

    async def stop(self) -> None:
        """Ends work that goes on when the server is started again: it drains. May be called twice."""

    async def close(self) -> None:
        """Ends all work: the server ends."""


@dataclass
class Service:
    """The state of one server: loading (no generator), serving, draining."""

    config: ApiConfig
    generator: TextGenerator | None = None
    """The only model's, or the default one's."""
    catalogue: Catalogue | None = None
    """The models of a server of several; None while they are loaded, and where there is one."""
    draining: bool = False
    fleet: Fleet | None = None
    """The engines or hosts; None until their start begins."""
    tracker: RequestTracker = field(default_factory=RequestTracker)
    tracing: TraceControl | None = None
    request_metrics: RequestMetrics = field(init=False)
    key_limits: KeyLimits = field(init=False)
    states: dict[type[Any], PluginState] = field(default_factory=dict)
    """States of plugins by type."""
    chats: ChatStore = field(init=False)
    handoffs: Handoffs = field(default_factory=NoHandoffs)
    """The handoffs of KV that bodies may ask for; the state of a plugin puts itself here."""
    has_settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the model is loaded, or will not be."""
    num_waiting_for_model: int = 0
    """Requests that wait for the model."""
    body_threads: LongWork = field(default_factory=lambda: LongWork(_NUM_BODY_THREADS))
    """Threads in which large bodies are inflated, decoded and translated."""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.request_metrics = RequestMetrics(self.config.api_keys.names)
        self.chats = ChatStore(self.config.response_store_bytes)
        self.request_metrics.follow(self.tracker)
        self.key_limits = KeyLimits(self.tracker)
        self.tracker.subscribe(on_finish=log_answer)

    @property
    def is_router(self) -> bool:
        return self.fleet is not None and self.fleet.is_router

    def state(self, kind: type[T]) -> T:
        """State of a plugin, which has this type."""
        return cast(T, self.states[kind])

    def ready_generator(self) -> TextGenerator:
        """The generator of the only model, or of the first one that has had a host.
        Raises ApiError: 503, the model is still loading."""
        if self.generator is None:
            raise unavailable("The model is loading.")
        return self.generator if self.catalogue is None else self.catalogue.first_started.generator

    async def hold_while_loading(self, timeout_s: float | None) -> None:
        """Returns when the model is loaded or will not be, or when it has taken too long for the server or for the
        client, which gives its request `timeout_s` in all; then whoever needs the model finds that it is loading.
        """
        limit_s = self.config.hold_while_loading_s
        if (
            self.generator is not None
            or self.draining
            or self.num_waiting_for_model >= _MAX_WAITING_FOR_MODEL
            or not limit_s
        ):
            return
        self.num_waiting_for_model += 1
        try:
            async with asyncio.timeout(limit_s if timeout_s is None else min(limit_s, timeout_s)):
                await self.has_settled.wait()
        except TimeoutError:
            pass
        finally:
            self.num_waiting_for_model -= 1

    def admit(self, model: str | None, client_request: ClientRequest) -> TextGenerator:
        """The generator for a new request that names `model`.
        Raises ApiError: 503 while loading or draining, 404 for a model that is not served here."""
        self.check_model(model, client_request)
        if self.draining:
            raise unavailable("The server is shutting down.")
        return self.named(model, client_request, answers=True).of_client(client_request)

    def named(
        self, model: str | None, client_request: ClientRequest, *, answers: bool = False
    ) -> TextGenerator:
        """The generator that a name means; where it `answers`, that of another model may take its place.
        Raises ApiError: 404, the model is not served here; 503, it has not been loaded."""
        self.check_model(model, client_request)
        generator = self.ready_generator()
        if self.catalogue is None:
            adapter = None if model is None else generator.adapters.find(model)
            return generator if adapter is None else generator.with_adapter(adapter)
        served, adapter = self._found(self.catalogue, model, client_request)
        if answers:
            if adapter is None:
                served = self.catalogue.choose(served, client_request)
            self._apply_rules(served.model, client_request)
            is_default = served is self.catalogue.default
            client_request.model = "" if is_default else served.model.name
        if not served.has_started:
            raise unavailable(f"The model {served.model.name!r} has no host yet.")
        return served.generator if adapter is None else served.generator.with_adapter(adapter)

    def _apply_rules(self, model: NamedModel, client_request: ClientRequest) -> None:
        """Holds a request to what its model allows."""
        if model.least_priority is not None:
            least = max(client_request.least_priority, model.least_priority)
            client_request.least_priority = least
        if client_request.timeout_s in (None, self.config.request_timeout_s):
            client_request.timeout_s = model.request_timeout_s or client_request.timeout_s

    def name_of(self, generator: TextGenerator) -> str:
        """The name under which a generator answers: the model's, or that of an adapter."""
        if generator.adapter is not None:
            return generator.adapter.name
        return generator.name or self.config.served_model_name

    def names(
        self, client_request: ClientRequest
    ) -> list[tuple[str, TextGenerator, Adapter | None]]:
        """All names under which the client may ask, models before their adapters.
        Raises ApiError: 503, the model is still loading."""
        generator = self.ready_generator()
        if self.catalogue is not None:
            found = self.catalogue.names(client_request)
            return [(name, served.generator, adapter) for name, served, adapter in found]
        names = (self.config.served_model_name, *self.config.model_aliases)
        models: list[tuple[str, TextGenerator, Adapter | None]]
        models = [(name, generator, None) for name in names]
        return models + [(adapter.name, generator, adapter) for adapter in generator.adapters]

    async def health(self) -> Health:
        """Ready as soon as one of the models makes progress. Raises ApiError: as `ready_generator`."""
        if self.catalogue is None or self.fleet is None:
            return await self.ready_generator().endpoint.health()
        return await self.fleet.health()

    async def load(self) -> LoadReport:
        """The load of the whole server. Raises ApiError: as `ready_generator`; EngineDeadError: all engines were
        given up."""
        if self.catalogue is None or self.fleet is None:
            return await self.ready_generator().endpoint.load()
        return await self.fleet.load()

    def check_room(self, client_request: ClientRequest) -> None:
        """Raises OverloadedError if the waiting queue is full for this client, whatever its request says."""
        if self.fleet is not None and self.generator is not None and not self.draining:
            self.fleet.check_room(client_request.key_name, client_request.weight)

    def check_model(self, model: str | None, client_request: ClientRequest) -> None:
        """Raises ApiError: 404, the model is not served here; 503, the name may be that of an adapter, or one of
        several models, that is loading."""
        if self.config.models:
            self.ready_generator()
        if self.catalogue is not None:
            self._found(self.catalogue, model, client_request)
            return
        served = self.config.served_model_name
        if model is None or model == served or model in self.config.model_aliases:
            return
        if self.config.any_model_name:
            return
        if self.ready_generator().adapters.find(model) is None:
            raise _not_served(model, repr(served))

    def _found(
        self, catalogue: Catalogue, model: str | None, client_request: ClientRequest
    ) -> tuple[ServedModel, Adapter | None]:
        """The model of a name, or, where any name will do, the one of no name.
        Raises ApiError: 404, the client may ask none."""
        found = catalogue.find(model, client_request)
        if found is None and self.config.any_model_name:
            found = catalogue.find(None, client_request)
        if found is None:
            raise _not_served(model, "one of those that /v1/models lists")
        return found


def _not_served(model: str | None, known: str) -> ApiError:
    if model is None:
        return ApiError(404, "This key may ask no model here.", "model", "model_not_found")
    message = f"The model {model[:200]!r} is not served here; it is {known}."
    return ApiError(404, message, "model", "model_not_found")
