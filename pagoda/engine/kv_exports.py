"""Requests whose KV is held for another engine: what the scheduler tells the `KVExporter`."""

from __future__ import annotations

from collections.abc import Iterable

from pagoda.engine.request import Request
from pagoda.kv.manager import KVManager
from pagoda.messages.frontend import GenerateRequest, KVSource, TokenChunk, TokenLogprobs
from pagoda.pd.exporter import KVExporter, Unwanted


class KVExports:
    """Follows requests with a `transfer_id`; without an exporter no request has one."""

    def __init__(self, kv: KVManager, exporter: KVExporter | None) -> None:
        self._kv = kv
        self._exporter = exporter

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
        transfer_id, request.transfer_id = request.transfer_id, None
        if transfer_id is None or self._exporter is None:
            return None
        key = self._kv.sequence_key(request.table, request.token_ids)
        num_cached_tokens = request.num_cached_tokens or 0
        return self._exporter.finish(transfer_id, key, token_id, logprobs, num_cached_tokens)

    def on_finished(self, request: Request) -> None:
        transfer_id, request.transfer_id = request.transfer_id, None
        if self._exporter is not None:
            self._exporter.request_ended(request.request_id)
            if transfer_id is not None:
                self._exporter.drop(transfer_id, "its request failed or was aborted")

    def on_preempted(self, request: Request) -> None:
        """Lets go of the KV: two requests that hold each other's room for others would wait for ever."""
        transfer_id, request.transfer_id = request.transfer_id, None
        if transfer_id is not None and self._exporter is not None:
            self._exporter.drop(transfer_id, "its request was preempted", goes_on=True)

    def on_workers_lost(self, requests: Iterable[Request]) -> None:
        if self._exporter is not None:
            for request in requests:
                request.transfer_id = None
            self._exporter.workers_lost()

    def drain_unwanted(self) -> list[Unwanted]:
        """Requests that no other engine needs any more, since the last call."""
        return [] if self._exporter is None else self._exporter.drain_unwanted()

    def make_room(self) -> bool:
        """Frees blocks that no other engine has asked for; False if there are none."""
        return self._exporter is not None and self._exporter.make_room()
