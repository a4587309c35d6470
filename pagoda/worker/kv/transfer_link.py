"""A worker's second connection to its engine: transfers begin and end on it while the worker computes a step."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import zmq

from pagoda.ipc.codec import Codec
from pagoda.kv.connector import TransferWorker
from pagoda.messages.transfers import TransferLink, TransferMessage, Transfers
from pagoda.messages.worker_config import WorkerConfig
from pagoda.worker.engine_link import connect
from pagoda.worker.kv.transfer_spans import TransferSpans

_FAREWELL_S = 5.0

_log = logging.getLogger(__name__)


class TransferThread:
    """Hands transfers to the worker's half, and their ends to the engine. Sleeps when there are none.

    When it cannot go on, neither can the worker: the process ends, and the engine starts another.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        config: WorkerConfig,
        open_half: Callable[[Callable[[], None]], TransferWorker],
        spans: TransferSpans,
    ) -> None:
        """`open_half` makes the worker's half, with what it has to call when a transfer has ended."""
        self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closing = False
        self._spans = spans
        self.half = open_half(self._wake)
        self._context = context
        self._address = address
        self._config = config
        self._thread = threading.Thread(target=self._run, name="kv-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, then the worker's half."""
        self._is_closing = True
        self._wake()
        self._thread.join(_FAREWELL_S)
        self.half.close()

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

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        codec_out = Codec[TransferMessage](TransferMessage)
        codec_in = Codec[Transfers](Transfers)
        socket.send(codec_out.encode(TransferLink()))
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._news, zmq.POLLIN)
        while not self._is_closing:
            ready = dict(poller.poll())
            if self._news in ready:
                os.eventfd_read(self._news)
                for end in self.half.poll():
                    socket.send(codec_out.encode(end))
                    self._spans.end(end)
            if socket in ready:
                message: Transfers = codec_in.decode(socket.recv())
                self._spans.begin(message.transfers)
                self.half.add_peers(message.added_peers)
                self.half.start(message.transfers)
                self.half.remove_peers(message.removed_peers)
