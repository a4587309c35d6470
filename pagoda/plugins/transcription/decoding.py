# SPDX-License-Identifier: Apache-2.0
"""Audio decoded in a process of its own, whose pieces are taken one by one."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator

import msgspec

from pagoda.api.errors import ApiError
from pagoda.errors import refuse
from pagoda.messages.audio import AudioFeatures, FeatureSpec, audio_features
from pagoda.plugins.transcription.messages import ChildOptions, Heard, Piece

MAX_S = 3600
"""Seconds of the longest audio; 25 MB of MP3 seldom are more."""
SEARCH_S = 3
"""Seconds at the end of a piece in which it is cut at the quietest place."""
_MAX_OPEN, _MAX_DECODING = 32, 2
_WHOLE_S = 120.0
"""Seconds in which a file must be decoded."""
_PIECE_S = 60.0
_SLICE_BYTES = 2**18
_MAX_HEAD_BYTES = 2**20
_CHILD = "pagoda.plugins.transcription.child"
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Environment of the process, which has nothing of the server's."""
_MISSING = "Audio is decoded by a library that is missing here; install pagoda[audio]."
_DAMAGED = "cannot be decoded: it is damaged, or no audio"


class DecodedAudio:
    """An audio whose pieces are read in their order."""

    def __init__(self, heard: Heard, features: FeatureSpec, process: Process) -> None:
        self.seconds = heard.seconds
        self.pieces = heard.pieces
        self._spec, self._process = features, process

    async def features(self) -> AudioFeatures:
        """Features of the next piece. Raises InvalidRequestError: the process has died of the file."""
        size = 4 * self._spec.mel_bins * self._spec.frames
        values = await _message(self._process, size, _PIECE_S)
        if len(values) != size:
            refuse("file", _DAMAGED)
        return await asyncio.to_thread(audio_features, values)


class AudioDecoder:
    """Starts processes, few at a time."""

    def __init__(self) -> None:
        self._open = asyncio.Semaphore(_MAX_OPEN)
        self._decoding = asyncio.Semaphore(_MAX_DECODING)

    @contextlib.asynccontextmanager
    async def opened(self, data: bytes, features: FeatureSpec) -> AsyncIterator[DecodedAudio]:
        """The audio in a file.
        Raises InvalidRequestError: it cannot be heard. ApiError: 501, the library is missing."""
        if any(importlib.util.find_spec(name) is None for name in ("av", "numpy")):
            raise ApiError(501, _MISSING)
        options = msgspec.json.encode(ChildOptions(features, MAX_S, SEARCH_S)).decode()
        async with self._open:
            process: Process | None = None
            try:
                async with self._decoding:
                    process = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-m", _CHILD, options),
                        stdin=PIPE,
                        stdout=PIPE,
                        stderr=DEVNULL,
                        env={**_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    )
                    await _feed(process, data)
                    heard = _heard(await _message(process, _MAX_HEAD_BYTES, _WHOLE_S))
                yield DecodedAudio(heard, features, process)
            finally:
                if process is not None:
                    await _end(process)


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
    """The next message of a process. Raises InvalidRequestError: it has ended, or takes too long."""
    pipe = process.stdout
    if pipe is None:
        raise RuntimeError("The process has no pipe.")
    try:
        async with asyncio.timeout(limit_s):
            size = int.from_bytes(await pipe.readexactly(4), "little")
            return await pipe.readexactly(min(size, most))
    except (asyncio.IncompleteReadError, TimeoutError):
        refuse("file", _DAMAGED)


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def piece_seconds(piece: Piece, rate: int) -> tuple[float, float]:
    """Seconds at which a piece begins and ends."""
    return piece.first / rate, piece.end / rate
