"""Traces transfers of KV beside the steps."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from pagoda.messages.transfers import Transfer, TransferEnd
from pagoda.telemetry.tracer import Args, Tracer
from pagoda.worker.kv.transfers import num_blocks

_ROW = "kv transfers"


class _UnderWay(NamedTuple):
    row: int
    began: int
    args: Args


class TransferSpans:
    """One for each transfer, from its order to its end. Those under way together are in rows of their own."""

    def __init__(self, tracer: Tracer, block_bytes: int) -> None:
        """`block_bytes` of this rank move for each block of a transfer."""
        self._tracer = tracer
        self._block_bytes = block_bytes
        self._under_way: dict[int, _UnderWay] = {}
        self._free_rows: list[int] = []

    def begin(self, transfers: Sequence[Transfer]) -> None:
        began = self._tracer.e2e()
        if not began:
            return
        for transfer in transfers:
            row = heappop(self._free_rows) if self._free_rows else self._tracer.open_row(_ROW)
            args = {
                "blocks": num_blocks(transfer),
                "source": transfer.source.__struct_config__.tag,
                "target": transfer.target.__struct_config__.tag,
                "bytes": num_blocks(transfer) * self._block_bytes,
            }
            self._under_way[transfer.transfer_id] = _UnderWay(row, began, args)

    def end(self, end: TransferEnd) -> None:
        seen = self._under_way.pop(end.transfer_id, None)
        if seen is None:  # it began before tracing did
            return
        args = {**seen.args, "failed": len(end.failed)} if end.failed else seen.args
        self._tracer.span("transfer", seen.began, args, row=seen.row)
        heappush(self._free_rows, seen.row)
