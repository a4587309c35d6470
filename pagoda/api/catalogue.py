# SPDX-License-Identifier: Apache-2.0
"""The models of a server of several: which of them a name means, and which answers when that one cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagoda.checkpoints.card import ModelCard
from pagoda.errors import OverloadedError
from pagoda.fleet.adapters import AdapterRegistry
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.replica_pool import stable_hash
from pagoda.messages.adapters import Adapter
from pagoda.telemetry.request_tracker import ClientRequest
from pagoda.text.model_text import ModelText
from pagoda.text.text_generator import TextGenerator


@dataclass(frozen=True)
class NamedModel:
    """One model of a server of several, which a pool of hosts answers."""

    name: str
    """Name of the pool, which answers have."""
    load_text: Callable[[], ModelText]
    """Raises ConfigError: a file of the text side cannot be used."""
    read_card: Callable[[], ModelCard] = ModelCard
    aliases: Sequence[str] = ()
    adapters: AdapterRegistry = field(default_factory=AdapterRegistry)
    fallback: Sequence[str] = ()
    """Names of models that answer while this one has no host that takes requests, or no room; in this order."""
    keys: frozenset[str] | None = None
    """Names of API keys that may ask for the model; None for all."""
    request_timeout_s: float | None = None
    """Seconds after which a request ends whose client gives it no time of its own; None for the server's."""
    least_priority: int | None = None
    """The lowest `priority` that a request may have; None for that of its key."""

    def serves(self, client: ClientRequest) -> bool:
        return self.keys is None or client.key_name in self.keys


class ServedModel(NamedTuple):
    model: NamedModel
    generator: TextGenerator
    dispatcher: Dispatcher

    @property
    def has_started(self) -> bool:
        """True once the model has had a host."""
        return self.dispatcher.state is not ReplicaState.STARTING

    def has_room(self, client: ClientRequest) -> bool:
        """True if a host takes requests, and there is room for one of the client."""
        if self.dispatcher.state is not ReplicaState.READY:
            return False
        try:
            self.dispatcher.check_room(client.key_name, client.weight)
        except OverloadedError:
            return False
        return True


class Catalogue:
    """The models of one server by all names; the first that a client may ask is meant where it names none.
    Their adapters stay the same."""

    def __init__(
        self, models: Sequence[ServedModel], splits: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Requests for a name in `splits` go to the models named there, in proportion to the numbers, which are
        above 0. Names differ."""
        self.models = {served.model.name: served for served in models}
        self._aliases = {alias: one for one in models for alias in one.model.aliases}
        self._adapters = {a.name: (one, a) for one in models for a in one.generator.adapters}
        self._splits = splits
        self.default = models[0]

    @property
    def first_started(self) -> ServedModel:
        """The first model that has had a host, else the default one."""
        return next((one for one in self.models.values() if one.has_started), self.default)

    def names(self, client: ClientRequest) -> Iterator[tuple[str, ServedModel, Adapter | None]]:
        """All names under which the client may ask, each with its model."""
        seen = [one for one in self.models.values() if one.model.serves(client)]
        for one in seen:
            for name in (one.model.name, *one.model.aliases):
                yield name, one, None
        for name, shares in self._splits.items():
            if own := self._open_to(client, shares):
                yield name, self.models[next(iter(own))], None
        for one, adapter in self._adapters.values():
            if one in seen:
                yield adapter.name, one, adapter

    def find(
        self, name: str | None, client: ClientRequest
    ) -> tuple[ServedModel, Adapter | None] | None:
        """The model that a name means for this request, and the adapter; None if there is none for the client.
        Without a name it is the first that the client may ask."""
        adapter: Adapter | None = None
        if name is None:
            served = next((it for it in self.models.values() if it.model.serves(client)), None)
        elif name in self._splits:
            shares = self._open_to(client, self._splits[name])
            served = self.models[share_of(shares, client.id)] if shares else None
        else:
            served = self.models.get(name) or self._aliases.get(name)
            if served is None:
                served, adapter = self._adapters.get(name, (None, None))
        if served is None or not served.model.serves(client):
            return None
        return served, adapter

    def _open_to(self, client: ClientRequest, shares: Mapping[str, float]) -> dict[str, float]:
        """The shares of the models that the client may ask."""
        return {it: share for it, share in shares.items() if self.models[it].model.serves(client)}

    def choose(self, served: ServedModel, client: ClientRequest) -> ServedModel:
        """The model that answers a request for `served`: that one, or the first of its fallback that can where it
        cannot."""
        if served.model.fallback and not served.has_room(client):
            others = (self.models[name] for name in served.model.fallback)
            return next(
                (one for one in others if one.model.serves(client) and one.has_room(client)), served
            )
        return served


def share_of(shares: Mapping[str, float], key: str) -> str:
    """One of the names of `shares`, in proportion to their numbers over all keys; the same key has the same."""
    point = stable_hash(key) / 2**64 * sum(shares.values())
    for name, share in shares.items():
        point -= share
        if point < 0:
            return name
    return list(shares)[-1]
