"""Routes of chunks: each running request belongs to one frontend."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pagoda.messages.frontend import GenerateRequest, TokenChunk


class RequestRoutes:
    """Maps ids of frontends to ids of the engine.

    Frontends choose ids by themselves. Where two of them choose the same, the engine gives the second request
    another id, and chunks go out under the id that their frontend knows.
    """

    def __init__(self) -> None:
        self._origins: dict[str, tuple[bytes, str]] = {}
        """Frontend and its id, by the engine's id."""
        self._engine_ids: dict[tuple[bytes, str], str] = {}
        self._num_renamed = 0

    def add(self, frontend: bytes, request: GenerateRequest) -> GenerateRequest | None:
        """The request under the engine's id; None if the frontend has a running request with this id already."""
        origin = frontend, request.request_id
        if origin in self._engine_ids:
            return None
        engine_id = request.request_id
        while engine_id in self._origins:
            self._num_renamed += 1
            engine_id = f"{request.request_id}#{self._num_renamed}"
        self._origins[engine_id], self._engine_ids[origin] = origin, engine_id
        if engine_id == request.request_id:
            return request
        return msgspec.structs.replace(request, request_id=engine_id)

    def remove(self, frontend: bytes, request_id: str) -> str | None:
        """Forgets a request; returns the engine's id of it, or None if the frontend has no such request."""
        engine_id = self._engine_ids.pop((frontend, request_id), None)
        if engine_id is not None:
            del self._origins[engine_id]
        return engine_id

    def sort(self, chunks: Iterable[TokenChunk]) -> dict[bytes, list[TokenChunk]]:
        """The chunks by frontend, under its ids. Forgets requests that have ended."""
        by_frontend: dict[bytes, list[TokenChunk]] = {}
        for chunk in chunks:
            frontend, request_id = self._origins[chunk.request_id]
            if chunk.finish_reason is not None:
                self.remove(frontend, request_id)
            if chunk.request_id != request_id:
                chunk = msgspec.structs.replace(chunk, request_id=request_id)
            by_frontend.setdefault(frontend, []).append(chunk)
        return by_frontend
