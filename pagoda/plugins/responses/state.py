# SPDX-License-Identifier: Apache-2.0
"""Responses and conversations that a server keeps in memory."""

from __future__ import annotations

from collections.abc import Mapping

from pagoda.api.answers.kept_conversations import ConversationStore
from pagoda.api.plugin import ApiPlugin
from pagoda.api.service import Service
from pagoda.plugins.responses.store import ResponseStore


class ResponseState:
    """The stores of one server."""

    def __init__(self, service: Service, plugins: Mapping[str, ApiPlugin]) -> None:  # noqa: ARG002
        max_bytes = service.config.response_store_bytes
        self.responses = ResponseStore(max_bytes)
        self.conversations = ConversationStore(max_bytes)

    def start(self) -> None:
        """Nothing works by itself."""

    async def stop(self) -> None:
        """Background responses may end while the server drains."""

    async def close(self) -> None:
        """Cancels background responses."""
        await self.responses.close()
