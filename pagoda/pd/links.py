"""An engine's ways to other engines: a listener if it holds KV for them, peers if it fetches KV from them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import zmq

from pagoda.engine.config import HandoffConfig
from pagoda.ipc.curve import start_authenticator
from pagoda.pd.listener import Listener, SocketListener
from pagoda.pd.peers import Peers, SocketPeers


@dataclass(frozen=True)
class HandoffLinks:
    engine_id: str
    """New at each start."""
    listener: Listener | None = None
    peers: Peers | None = None

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
        if self.peers is not None:
            self.peers.close()


class SocketLinks:
    """They are sockets, in a context of their own."""

    def __init__(self, config: HandoffConfig, replica: int) -> None:
        """
        Raises:
            ConfigError: the listener's port is taken, or the host has no such address.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        start_authenticator(self._context, config.keys)
        listener = peers = None
        try:
            if config.role.holds_kv:
                port = config.port + replica if config.port else 0
                listener = SocketListener(self._context, config.host, port, config.keys)
            if config.role.fetches_kv:
                peers = SocketPeers(self._context, config.keys)
        except BaseException:
            self._context.term()
            raise
        self.links = HandoffLinks(secrets.token_hex(8), listener, peers)

    def close(self) -> None:
        """Waits until what was sent is out, for a second or so."""
        self.links.close()
        self._context.term()
