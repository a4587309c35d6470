# SPDX-License-Identifier: Apache-2.0
"""A stream keeps what its reader has not read, up to a bound."""

from __future__ import annotations

import asyncio

import pytest

from pagoda.errors import SlowReaderError
from pagoda.fleet.token_stream import MAX_UNREAD, TokenStream
from pagoda.messages.frontend import FinishReason, TokenChunk, TokenLogprobs


def test_a_reader_that_falls_too_far_behind_is_told_and_its_request_ends() -> None:
    async def run() -> None:
        abandoned: list[None] = []
        stream = TokenStream(lambda: abandoned.append(None))
        pushed = 0
        while not stream.finished:
            stream.push(TokenChunk("r", [1]))
            pushed += 1
        assert pushed == MAX_UNREAD // 2 + 2
        assert len(abandoned) == 1
        with pytest.raises(SlowReaderError, match="read the answer too slowly"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()
        assert len(abandoned) == 1

    asyncio.run(run())


def test_log_probabilities_count() -> None:
    async def run() -> None:
        stream = TokenStream()
        top = [TokenLogprobs(-1.0, 1, [1] * 20, [-1.0] * 20)]
        pushed = 0
        while not stream.finished:
            stream.push(TokenChunk("r", [1], logprobs=top))
            pushed += 1
        assert pushed == MAX_UNREAD // 42 + 2

    asyncio.run(run())


def test_what_is_read_does_not_count() -> None:
    async def run() -> None:
        stream = TokenStream()
        for _ in range(MAX_UNREAD):
            stream.push(TokenChunk("r", [1]))
            await anext(stream)
        stream.push(TokenChunk("r", [1] * 10 * MAX_UNREAD, FinishReason.LENGTH))
        assert len((await anext(stream)).token_ids) == 10 * MAX_UNREAD
        assert [chunk async for chunk in stream] == []

    asyncio.run(run())
