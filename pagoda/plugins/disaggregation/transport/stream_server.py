# SPDX-License-Identifier: Apache-2.0
"""Serves streams to readers, and limits strangers: few of them, for a short time."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter

from pagoda.errors import TransportError

MAX_STRANGERS = 32
"""Limit of connections without a proof; beyond it the oldest one from the most frequent origin is closed."""
_CROWD_PAUSE_S = 0.01
"""Seconds between two connections while there are so many: this limits the cost of handshakes, and gives them
time."""
MAX_READERS = 512
HANDSHAKE_S = 5.0
_BACKLOG = 128
_PAUSE_S = 0.1
"""Seconds after a failed accept, such as for want of descriptors."""
_FAREWELL_S = 5.0
_WARNING_INTERVAL_S = 10.0

_log = logging.getLogger(__name__)


class _Connection:
    """A connection, whatever its socket is wrapped in."""

    def __init__(self, stream: socket.socket, origin: str) -> None:
        self.origin = origin
        """The address of its host; empty where all are on this one."""
        self._handle = stream.dup()
        self._lock = threading.Lock()

    def hang_up(self) -> None:
        """Wakes the thread that waits at it."""
        with self._lock, contextlib.suppress(OSError):
            self._handle.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._handle.close()


class StreamServer(ABC):
    """A thread that accepts connections, and one for each of them."""

    def __init__(self, listener: socket.socket, name: str) -> None:
        """The threads are called `name`, and begin at once."""
        self._listener = listener
        self._name = name
        self._state = threading.Condition()
        """Guards all that follows."""
        self._strangers: dict[_Connection, threading.Thread] = {}
        self._leaving: dict[_Connection, threading.Thread] = {}
        """Strangers that have been hung up on, and whose threads have not ended yet."""
        self._readers: dict[_Connection, threading.Thread] = {}
        self._is_closed = False
        self._next_warning_at = 0.0
        listener.listen(_BACKLOG)
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def _admit(self, stream: socket.socket, deadline: float) -> socket.socket:
        """Returns the stream for `_serve`.

        Raises TransportError or OSError if the peer does not prove the secret before `deadline`.
        """

    @abstractmethod
    def _serve(self, stream: socket.socket) -> None:
        """Returns, or raises TransportError or OSError, when the reader has gone."""

    def close(self) -> None:
        with self._state:
            if self._is_closed:
                return
            self._is_closed = True
            self._state.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(_FAREWELL_S)
        self._listener.close()
        with self._state:
            left = self._strangers | self._leaving | self._readers
        for connection in left:
            connection.hang_up()
        for thread in left.values():
            thread.join(_FAREWELL_S)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                stream, address = self._listener.accept()
            except OSError:
                if not self._is_closed:
                    time.sleep(_PAUSE_S)
                continue
            try:
                self._receive(stream, address[0] if isinstance(address, tuple) else "")
            except (OSError, RuntimeError):  # no descriptor or no thread is left
                stream.close()
                time.sleep(_PAUSE_S)

    def _receive(self, stream: socket.socket, origin: str) -> None:
        connection = _Connection(stream, origin)
        thread = threading.Thread(
            target=self._host, args=(stream, connection), name=self._name, daemon=True
        )
        with self._state:
            # Others wait in the kernel meanwhile.
            if len(self._strangers) >= MAX_STRANGERS:
                self._state.wait_for(lambda: self._is_closed, _CROWD_PAUSE_S)
            if len(self._strangers) >= MAX_STRANGERS:
                self._send_away_one(origin)
            self._state.wait_for(lambda: len(self._leaving) < MAX_STRANGERS, HANDSHAKE_S)
            self._strangers[connection] = thread
        try:
            thread.start()
        except RuntimeError:
            self._forget(connection)
            raise

    def _send_away_one(self, newcomer: str) -> None:
        """Closes the oldest stranger of the most frequent origin: a crowd from one place must not keep others
        out."""
        crowds = Counter(connection.origin for connection in self._strangers)
        crowds[newcomer] += 1
        oldest = max(self._strangers, key=lambda connection: crowds[connection.origin])
        self._leaving[oldest] = self._strangers.pop(oldest)
        oldest.hang_up()

    def _host(self, stream: socket.socket, connection: _Connection) -> None:
        try:
            stream = self._admit(stream, time.monotonic() + HANDSHAKE_S)
            if self._welcome(connection):
                self._serve(stream)
        except (TransportError, OSError) as error:
            self._warn(error)
        except Exception:
            _log.exception("a reader of KV could not be served")
        finally:
            connection.hang_up()
            stream.close()
            self._forget(connection)

    def _welcome(self, connection: _Connection) -> bool:
        with self._state:
            if self._is_closed or len(self._readers) >= MAX_READERS:
                return False
            thread = self._strangers.pop(connection, None)
            if thread is not None:
                self._readers[connection] = thread
            return thread is not None

    def _forget(self, connection: _Connection) -> None:
        with self._state:
            self._strangers.pop(connection, None)
            self._leaving.pop(connection, None)
            self._state.notify_all()
            self._readers.pop(connection, None)
        connection.close()

    def _warn(self, error: Exception) -> None:
        with self._state:
            now = time.monotonic()
            if self._is_closed or now < self._next_warning_at:
                return
            self._next_warning_at = now + _WARNING_INTERVAL_S
        _log.warning("a connection for KV ended: %s", error)
