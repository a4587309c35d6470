# SPDX-License-Identifier: Apache-2.0
"""The socket that a server listens on, plain or with TLS."""

from __future__ import annotations

import asyncio
import ssl

from aiohttp import web

_HANDSHAKE_TIMEOUT_S = 10.0
"""Seconds for a client to finish its handshake; then the connection is closed."""
_SHUTDOWN_TIMEOUT_S = 5.0
"""Seconds for a client to say that it has seen the end of a connection."""
_BACKLOG = 1024


class Listener(web.BaseSite):
    """A site of aiohttp whose handshakes are bounded in time."""

    def __init__(
        self, runner: web.ServerRunner, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=_BACKLOG)
        self._host = host
        self._asked_port = port

    @property
    def name(self) -> str:
        """URL of the server, with the port that it has."""
        port = self._runner.addresses[0][1] if self._runner.addresses else self._asked_port
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'http' if self._ssl_context is None else 'https'}://{host}:{port}"

    async def start(self) -> None:
        """Raises OSError: the address cannot be listened on; OverflowError: there is no such port."""
        await super().start()
        server = self._runner.server
        if server is None:
            raise RuntimeError("the runner is not set up")
        is_plain = self._ssl_context is None
        self._server = await asyncio.get_running_loop().create_server(
            server,
            self._host,
            self._asked_port,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=None if is_plain else _HANDSHAKE_TIMEOUT_S,
            ssl_shutdown_timeout=None if is_plain else _SHUTDOWN_TIMEOUT_S,
        )
