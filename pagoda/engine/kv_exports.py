"""Requests whose KV is held for another engine: what the scheduler tells the `KVExporter`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pagoda.engine.request import Request
from pagoda.kv.manager import KVManager
from pagoda.messages.frontend import GenerateRequest, KVSource, TokenChunk, TokenLogprobs
from pagoda.pd.exporter import FirstToken, KVExporter


class Unwanted(NamedTuple):
    """News that no other engine needs the KV of this request any more."""

    request_id: str


class KVExports:
    """Follows requests with a `transfer_id`; without an exporter no request has one."""

    def __init__(self, kv: KVManager, exporter: KVExporter | None) -> None:
        self._kv = kv
        self._exporter = exporter
        self._request_ids: dict[str, str] = {}
        """Requests by the transfer under which their KV is held."""
        self._orphans: dict[str, None] = {}
        """Requests that another engine computes by itself now, since their KV was lost here."""

    def refusal(self, message: GenerateRequest) -> str | None:
        if message.holds_kv and self._exporter is None:
            return (
                "This engine holds no KV for others; it was started without --role prefill or both."
            )
        return None

    def open(self, message: GenerateRequest, request: Request) -> list[TokenChunk]:
        """The request is queued. Returns the chunk that says where its KV will be."""
        if not message.holds_kv or self._exporter is None:
            return []
        num_blocks = request.num_tokens // self._kv.block_size
        source = self._exporter.open(request.request_id, num_blocks)
        request.transfer_id = source.transfer_id
        self._request_ids[source.transfer_id] = request.request_id
        return [TokenChunk(request.request_id, [], kv_source=source)]

    def on_published(self, request: Request) -> None:
        if request.transfer_id is not None and self._exporter is not None:
            table, transfer_id = request.table, request.transfer_id
            first, end = self._exporter.num_held(transfer_id), table.num_published
            if end > first:
                blocks, keys = table.blocks[first:end], table.keys[first + 1 : end + 1]
                self._exporter.hold(transfer_id, blocks, keys)

    def on_prefilled(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None
    ) -> KVSource | None:
        """The request ends with this token, and its KV stays; returns where it is."""
        if request.transfer_id is None or self._exporter is None:
            return None
        transfer_id = self._forget(request, request.transfer_id)
        key = self._kv.sequence_key(request.table, request.token_ids)
        token = FirstToken(key, token_id, logprobs, request.num_cached_tokens or 0)
        return self._exporter.finish(transfer_id, token)

    def drop(self, request: Request, reason: str) -> None:
        """The KV of the request is worth nothing to another engine any more; `reason` is a clause."""
        if request.transfer_id is not None and self._exporter is not None:
            self._exporter.drop(self._forget(request, request.transfer_id), reason)

    def _forget(self, request: Request, transfer_id: str) -> str:
        request.transfer_id = None
        del self._request_ids[transfer_id]
        return transfer_id

    def on_finished(self, request: Request) -> None:
        self._orphans.pop(request.request_id, None)
        self.drop(request, "its request failed or was aborted")

    def on_preempted(self, request: Request) -> None:
        """Lets go of the KV: two requests that hold each other's room for others would wait for ever."""
        self._note_orphan(request)
        self.drop(request, "its request was preempted")

    def on_workers_lost(self, requests: Iterable[Request]) -> None:
        if self._exporter is not None:
            for request in requests:
                self._note_orphan(request)
                request.transfer_id = None
            self._request_ids.clear()
            self._exporter.workers_lost()

    def _note_orphan(self, request: Request) -> None:
        transfer_id, exporter = request.transfer_id, self._exporter
        if transfer_id is not None and exporter is not None and exporter.is_asked_for(transfer_id):
            self._orphans[request.request_id] = None

    def drain_unwanted(self) -> list[Unwanted]:
        """Requests that no other engine needs any more, since the last call."""
        if self._exporter is None:
            return []
        orphans, self._orphans = self._orphans, {}
        released = (unwanted.transfer_id for unwanted in self._exporter.drain_unwanted())
        request_ids = [self._request_ids[it] for it in released if it in self._request_ids]
        return [Unwanted(request_id) for request_id in (*orphans, *request_ids)]

    def make_room(self) -> bool:
        """Frees blocks that no other engine has asked for; False if there are none."""
        return self._exporter is not None and self._exporter.make_room()
