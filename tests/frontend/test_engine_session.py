"""What comes back from an engine, on its way to whoever waits for it."""

from __future__ import annotations

import asyncio

from pagoda.frontend.engine_session import EngineSession
from pagoda.messages.frontend import (
    FinishReason,
    FrontendMessage,
    GenerateRequest,
    TokenChunk,
    TokenChunks,
)
from pagoda.messages.sampling_params import SamplingParams


async def test_chunks_come_when_they_are_received_not_when_they_are_read() -> None:
    now_ns = [0]
    sent: asyncio.Queue[FrontendMessage] = asyncio.Queue()
    session = EngineSession(sent.put, lambda: None, lambda: now_ns[0])
    request = GenerateRequest(
        request_id="r", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=2)
    )
    chunks = aiter(session.generate(request))
    first = asyncio.ensure_future(anext(chunks))
    await sent.get()
    for at, reason in ((5, None), (8, FinishReason.LENGTH)):
        now_ns[0] = at
        # What another process has stamped is of its clock.
        session.take(TokenChunks([TokenChunk("r", [7], reason, received_ns=1)]))
    now_ns[0] = 100
    read = [await first, *[chunk async for chunk in chunks]]
    assert [chunk.received_ns for chunk in read] == [5, 8]
