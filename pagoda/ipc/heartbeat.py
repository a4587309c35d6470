"""Sockets between routers and hosts notice a line that is cut: the system alone would wait for minutes."""

from __future__ import annotations

from typing import Any

import zmq

HEARTBEAT_S = 1.25
SILENCE_S = 5.0
"""A peer whose end of the connection says nothing for so long is gone."""


def notice_silence(socket: zmq.Socket[Any]) -> None:
    """Lets `socket`, before it is bound or connected, hang up on silent peers. Peers need not do the same."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(HEARTBEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(SILENCE_S * 1000))
