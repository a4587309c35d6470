# SPDX-License-Identifier: Apache-2.0
"""Audio decoded in a process of its own, whose pieces are taken one by one."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator

import msgspec

from pagoda.api.errors import ApiError
from pagoda.api.http.under_way import UnderWay
from pagoda.concurrency.async_utils import cancel_all
from pagoda.errors import DeadlineError, InvalidRequestError, refuse
from pagoda.messages.audio import FeatureSpec
from pagoda.messages.encoder_input import EncoderInput, encoder_input
from pagoda.plugins.transcription.messages import ChildOptions, Heard, Piece

MAX_S = 3600
"""Seconds of the longest audio; 25 MB of MP3 seldom are more."""
SEARCH_S = 3
"""Seconds at the end of a piece in which it is cut at the quietest place."""
_MAX_OPEN, _MAX_DECODING = 32, 2
_MAX_UNDER_WAY = 128
_START_S, _WHOLE_S = 60.0, 120.0
"""Seconds in which a process must have started, and a file must be decoded."""
_PIECE_S = 60.0
_SLICE_BYTES = 2**18
_MAX_HEAD_BYTES = 2**20
_CHILD = "pagoda.plugins.transcription.child"
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Environment of the process, which has nothing of the server's."""
_MISSING = "Audio is decoded by a library that is missing here; install pagoda[audio]."
_log = logging.getLogger(__name__)
_DAMAGED = "cannot be decoded: it is damaged, or no audio"


class DecodedAudio:
    """An audio whose pieces are read in their order."""

    def __init__(self, heard: Heard, features: FeatureSpec, process: Process) -> None:
        self.seconds = heard.seconds
        self.pieces = heard.pieces
        self._spec, self._process = features, process

    async def features(self) -> EncoderInput:
        """Features of the next piece. Raises InvalidRequestError: the process has died of the file."""
        size = 4 * self._spec.mel_bins * self._spec.frames
        values = await _message(self._process, size, _PIECE_S)
        if len(values) != size:
            refuse("file", _DAMAGED)
        return await asyncio.to_thread(encoder_input, values, self._spec.positions)


class AudioDecoder:
    """Starts processes, few at a time."""

    def __init__(self) -> None:
        self._open = asyncio.Semaphore(_MAX_OPEN)
        self._decoding = asyncio.Semaphore(_MAX_DECODING)
        self.under_way = UnderWay("audios", _MAX_UNDER_WAY, _MAX_UNDER_WAY // 2)

    @contextlib.asynccontextmanager
    async def opened(
        self, data: bytes, features: FeatureSpec, left_s: float | None = None
    ) -> AsyncIterator[DecodedAudio]:
        """The audio in a file, which must be decoded within `left_s`, if that is given.
        Raises InvalidRequestError: it cannot be heard. DeadlineError. ApiError: 501, the library is missing; 500,
        it does not start; 503, the file took too long."""
        if any(importlib.util.find_spec(name) is None for name in ("av", "numpy")):
            raise ApiError(501, _MISSING)
        options = msgspec.json.encode(ChildOptions(features, MAX_S, SEARCH_S)).decode()
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(left_s):
                    await stack.enter_async_context(self._open)
                    async with self._decoding:
                        process = await _started(options)
                        stack.push_async_callback(_end, process)
                        heard = await _first_words(process, data)
            except TimeoutError:
                raise DeadlineError from None
            yield DecodedAudio(heard, features, process)


async def _started(options: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", _CHILD, options),
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        env={**_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


async def _first_words(process: Process, data: bytes) -> Heard:
    """Length and pieces of a file, which a process tells. Raises as `AudioDecoder.opened`."""
    feeding = asyncio.create_task(_feed(process, data))
    try:
        try:
            await _message(process, 0, _START_S)
        except InvalidRequestError:
            _log.error(
                "the process that decodes audio does not start: %s -m %s", sys.executable, _CHILD
            )
            raise ApiError(500, "The process that decodes audio did not start.") from None
        return _heard(await _message(process, _MAX_HEAD_BYTES, _WHOLE_S))
    finally:
        await cancel_all([feeding])


def _heard(message: bytes) -> Heard:
    """The first message. Raises InvalidRequestError: it says what is wrong, or is none."""
    try:
        heard = msgspec.json.decode(message, type=Heard)
    except msgspec.MsgspecError:
        refuse("file", _DAMAGED)
    if heard.error:
        refuse("file", heard.error)
    return heard


async def _feed(process: Process, data: bytes) -> None:
    """Gives a process its input, unless it ends before."""
    pipe = process.stdin
    if pipe is None:
        raise RuntimeError("The process has no pipe.")
    with contextlib.suppress(ConnectionError):
        for start in range(0, len(data), _SLICE_BYTES):
            pipe.write(data[start : start + _SLICE_BYTES])
            await pipe.drain()
    pipe.close()


async def _message(process: Process, most: int, limit_s: float) -> bytes:
    """The next message of a process. Raises InvalidRequestError: it has ended. ApiError: 503, it is too slow."""
    pipe = process.stdout
    if pipe is None:
        raise RuntimeError("The process has no pipe.")
    try:
        async with asyncio.timeout(limit_s):
            size = int.from_bytes(await pipe.readexactly(4), "little")
            return await pipe.readexactly(min(size, most))
    except asyncio.IncompleteReadError:
        refuse("file", _DAMAGED)
    except TimeoutError:
        raise ApiError(503, "The audio was not decoded in time.") from None


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.communicate()  # nobody else reads what it has written ahead


def piece_seconds(piece: Piece, rate: int) -> tuple[float, float]:
    """Seconds at which a piece begins and ends."""
    return piece.first / rate, piece.end / rate
