# SPDX-License-Identifier: Apache-2.0
"""The host of a request that a gateway brings there: chosen by the router's policy, and counted as the router's
own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from pagoda.api.openai.bodies import Tools
from pagoda.api.service import Service
from pagoda.errors import PagodaError
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.placement import Counted, ReplicaSlot
from pagoda.messages.adapters import Adapter
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.telemetry.request_tracker import ClientRequest
from pagoda.text.templates.conversation import Messages
from pagoda.text.text_generator import TextGenerator

_SESSION = "x-session-id"
_MOST_OUTPUT = 2**31 - 1


class AskedBody(msgspec.Struct, frozen=True):
    """The part of a body that decides on a host; all else is the host's to read."""

    model: str | None = None
    prompt: Any = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    cache_salt: str | None = None


_decode = msgspec.json.Decoder(AskedBody).decode


class Picked(NamedTuple):
    """The hosts of a request, as `IP:PORT`."""

    endpoint: str
    counted: Counted
    prefill: str | None
    """The host that is to compute the prompt; None if that is the one that answers."""
    computing: Counted | None
    """Work of that host; None like it."""


class Picker:
    """Picks hosts of a router."""

    def __init__(self, service: Service, port: int) -> None:
        """`port` is that of the hosts' own API."""
        self._service = service
        self._port = port
        self._numbers = itertools.count()

    @property
    def is_ready(self) -> bool:
        """True if some host takes requests, and the router does not end."""
        service = self._service
        fleet = service.fleet
        pools = () if fleet is None else fleet.pools.values()
        has_hosts = any(pool.slots.takers.num_takers for pool in pools)
        return service.generator is not None and has_hosts and not service.draining

    async def request(
        self, headers: dict[str, str], body: bytes
    ) -> tuple[GenerateRequest, Dispatcher | None]:
        """The request that a body is likely to be at its host, and the pool of its model; None before the
        start. Of a body that is none, nothing is known: the host refuses it."""
        number = next(self._numbers)
        asked = AskedBody()
        client = ClientRequest(id=f"epp-{number}", arrived_ns=0, num_body_bytes=len(body))
        try:
            if body:
                threads = self._service.body_threads
                asked = await threads.run_sized(
                    partial(_decode, body), len(body), client.budget, client.key_name
                )
        except (msgspec.DecodeError, PagodaError, UnicodeDecodeError, RecursionError):
            pass
        pool, generator, adapter = self._model(asked.model, client)
        token_ids: list[int] = []
        if generator is not None:
            with contextlib.suppress(PagodaError, UnicodeDecodeError):
                token_ids = await self._token_ids(asked, generator.of_client(client))
        given = asked.max_completion_tokens or asked.max_tokens or _MOST_OUTPUT
        sampling = SamplingParams(max_tokens=min(max(1, given), _MOST_OUTPUT), seed=0)
        request = GenerateRequest(
            request_id=client.id,
            prompt_token_ids=token_ids or [0],
            work=Work(sampling, adapter="" if adapter is None else adapter.digest),
            cache_salt=asked.cache_salt,
            session=headers.get(_SESSION),
        )
        return request, pool

    def _model(
        self, name: str | None, client: ClientRequest
    ) -> tuple[Dispatcher | None, TextGenerator | None, Adapter | None]:
        """The pool that answers requests for a name, its texts and the adapter; the default ones for a name that
        nobody serves, which the host refuses."""
        service = self._service
        fleet, generator, catalogue = service.fleet, service.generator, service.catalogue
        if fleet is None or generator is None:
            return None, None, None
        if catalogue is None:
            return fleet.dispatcher, generator, generator.adapters.find(name or "")
        found = catalogue.find(name, client)
        if found is None:
            return fleet.dispatcher, generator, None
        served, adapter = found
        if adapter is None:
            served = catalogue.choose(served, client)
        return served.dispatcher, served.generator, adapter

    async def _token_ids(self, asked: AskedBody, generator: TextGenerator) -> list[int]:
        if asked.messages is not None:
            text = await generator.render(
                asked.messages,
                tools=asked.tools,
                chat_template_kwargs=asked.chat_template_kwargs,
            )
            return await generator.encode(text, add_special_tokens=False, param="messages")
        prompt = asked.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            [prompt] = prompt
        if isinstance(prompt, str):
            return await generator.encode(prompt, add_special_tokens=True)
        if not isinstance(prompt, list):
            return []
        limits = generator.endpoint.limits
        ids = prompt[: limits.max_model_len]
        are_ids = all(isinstance(one, int) for one in ids)
        return [one for one in ids if 0 <= one < limits.vocab_size] if are_ids else []

    @contextlib.contextmanager
    def picked(
        self, request: GenerateRequest, pool: Dispatcher | None, subset: Sequence[str] | None
    ) -> Iterator[Picked | None]:
        """The host of a pool that answers, where the request counts as long as the context lasts, and the one that
        computes its prompt; None if no host that may be picked takes requests."""
        if pool is None:
            yield None
            return
        excluded: Collection[int] = ()
        if subset is not None:
            allowed = {endpoint.rpartition(":")[0] for endpoint in subset}
            excluded = {slot.number for slot in pool.slots if _host_of(slot.name) not in allowed}
        with pool.counted(request, excluded) as counted:
            if counted is None:
                yield None
                return
            with pool.counted_prefill(request, counted) as prefill:
                endpoint = self._endpoint(counted.slot)
                yield Picked(
                    endpoint,
                    counted,
                    None if prefill is None else self._endpoint(prefill.slot),
                    prefill,
                )

    def _endpoint(self, slot: ReplicaSlot) -> str:
        return f"{_host_of(slot.name)}:{self._port}"


def _host_of(name: str) -> str:
    """The address of a host without the port at which routers reach it."""
    return name.partition("#")[0].rpartition(":")[0]
