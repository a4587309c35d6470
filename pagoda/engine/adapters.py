# SPDX-License-Identifier: Apache-2.0
"""Adapters of one engine: which are loaded, and which go as soon as no request needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from pagoda.engine.request import Request
from pagoda.executor.base import Executor
from pagoda.messages.adapters import Adapter, AdapterLoaded


class EngineAdapters:
    """Requests of an adapter are taken from when its load has ended until it is to be unloaded."""

    def __init__(self, adapters: Iterable[Adapter], executor: Executor) -> None:
        """`adapters` are those that workers load at their start."""
        self._executor = executor
        self._loaded = {adapter.digest for adapter in adapters}
        self._leaving: dict[str, deque[str]] = {}
        """Requests that may still need an adapter, by its digest."""
        self._news: list[AdapterLoaded] = []

    def has(self, digest: str) -> bool:
        return digest in self._loaded

    def load(self, adapter: Adapter) -> None:
        digest = adapter.digest
        if digest in self._leaving:
            del self._leaving[digest]
            self._loaded.add(digest)
        if digest in self._loaded:
            self._news.append(AdapterLoaded(digest))
        else:
            self._executor.load_adapter(adapter)

    def unload(self, digest: str, requests: Mapping[str, Request]) -> None:
        """No request of the adapter is taken from now on; `requests` are those that there are."""
        self._loaded.discard(digest)
        users = (name for name, request in requests.items() if request.work.adapter == digest)
        self._leaving[digest] = deque(users)

    def on_loaded(self, message: AdapterLoaded) -> None:
        if message.error:
            self._executor.unload_adapter(message.digest)
        else:
            self._loaded.add(message.digest)
        self._news.append(message)

    def step(self, requests: Mapping[str, Request]) -> None:
        """Unloads what no request needs any more."""
        for digest, users in [*self._leaving.items()]:
            while users and users[0] not in requests:
                users.popleft()
            if not users:
                del self._leaving[digest]
                self._executor.unload_adapter(digest)

    def drain_news(self) -> list[AdapterLoaded]:
        """Ends of loads since the last call."""
        news, self._news = self._news, []
        return news
