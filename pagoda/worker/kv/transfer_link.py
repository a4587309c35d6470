# SPDX-License-Identifier: Apache-2.0
"""A worker's second connection to its engine: transfers begin and end on it while the worker computes a step."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import zmq

from pagoda.ipc.codec import Codec
from pagoda.ipc.door import pieces
from pagoda.messages.transfers import (
    RemoteBlocks,
    Transfer,
    TransferEnd,
    TransferLink,
    TransferMessage,
    Transfers,
    tier_name,
)
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import Args, Tracer
from pagoda.worker.engine_link import connect
from pagoda.worker.kv.jobs import Jobs, num_blocks
from pagoda.worker.kv.transfers import TransferWorker

_FAREWELL_S = 5.0
_LOOK_MS = 1000
"""Milliseconds from one look at a tier that owes blocks to the next."""

_ROW = "kv transfers"

_log = logging.getLogger(__name__)


class _TracedTransfer(NamedTuple):
    row: int
    began: int
    args: Args


class TransferSpans:
    """One for each transfer, from its order to its end. Those under way together are in rows of their own."""

    def __init__(self, tracer: Tracer, block_bytes: int, group_bytes: Sequence[int]) -> None:
        """Blocks are of `block_bytes` on this rank, those of other engines of `group_bytes` by KV group."""
        self._tracer = tracer
        self._block_bytes = block_bytes
        self._group_bytes = group_bytes
        self._under_way: dict[int, _TracedTransfer] = {}
        self._free_rows: list[int] = []

    def begin(self, transfers: Sequence[Transfer]) -> None:
        began = self._tracer.e2e()
        if not began:
            return
        for transfer in transfers:
            row = heappop(self._free_rows) if self._free_rows else self._tracer.open_row(_ROW)
            args = {
                "blocks": num_blocks(transfer),
                "source": tier_name(transfer.source),
                "target": tier_name(transfer.target),
                "bytes": num_blocks(transfer) * self._bytes_each(transfer),
            }
            self._under_way[transfer.transfer_id] = _TracedTransfer(row, began, args)

    def _bytes_each(self, transfer: Transfer) -> int:
        source = transfer.source
        if isinstance(source, RemoteBlocks):
            return self._group_bytes[source.group]
        return self._block_bytes

    def end(self, end: TransferEnd) -> None:
        seen = self._under_way.pop(end.transfer_id, None)
        if seen is None:  # it began before tracing did
            return
        args = {**seen.args, "failed": len(end.failed)} if end.failed else seen.args
        self._tracer.span("transfer", seen.began, args, row=seen.row)
        heappush(self._free_rows, seen.row)


class TransferThread:
    """Hands transfers to the worker's half, and their ends to the engine. Sleeps when there are none.

    When it cannot go on, neither can the worker: the process ends, and the engine starts another.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        config: WorkerConfig,
        open_transfers: Callable[[Jobs], TransferWorker],
        spans: TransferSpans,
    ) -> None:
        """`open_transfers` is called at once, with the jobs in which its transfers are to end."""
        self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closing = False
        self._last_id = -1
        self._spans = spans
        self.jobs = Jobs(self._wake)
        self.transfers = open_transfers(self.jobs)
        self._context = context
        self._address = address
        self._config = config
        self._thread = threading.Thread(target=self._run, name="kv-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, then all transfers."""
        self._is_closing = True
        self._wake()
        self._thread.join(_FAREWELL_S)
        self.transfers.close()

    def _wake(self) -> None:
        os.eventfd_write(self._news, 1)

    def _run(self) -> None:
        try:
            rank = self._config.parallel.rank_in_replica(self._config.place)
            socket = connect(self._context, self._address, self._config, f"kv-{rank}")
            try:
                self._serve(socket)
            finally:
                socket.close(linger=0)
        except Exception:
            _log.exception("transfers cannot be served any more")
            os._exit(1)

    def _check_turn(self, message: Transfers) -> None:
        """Raises ValueError: a transfer came twice or out of turn, and would write to blocks of others by now."""
        for transfer in message.transfers:
            if transfer.transfer_id <= self._last_id:
                raise ValueError(f"Transfer {transfer.transfer_id} came twice or out of turn.")
            self._last_id = transfer.transfer_id

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        codec_out = Codec[TransferMessage](TransferMessage)
        codec_in = Codec[Transfers](Transfers)
        socket.send(codec_out.encode(TransferLink()))
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._news, zmq.POLLIN)
        while not self._is_closing:
            ready = dict(poller.poll(_LOOK_MS if self.transfers.owes_blocks else None))
            self.transfers.give_up()
            if self._news in ready:
                os.eventfd_read(self._news)
                for news in self.jobs.poll():
                    socket.send_multipart(pieces(codec_out.encode(news)))
                    if isinstance(news, TransferEnd):
                        self._spans.end(news)
            if socket in ready:
                message: Transfers = codec_in.decode(socket.recv())
                self._check_turn(message)
                self._spans.begin(message.transfers)
                self.transfers.apply(message)
