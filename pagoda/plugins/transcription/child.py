# SPDX-License-Identifier: Apache-2.0
"""The process that decodes a client's audio: `python -m pagoda.plugins.transcription.child OPTIONS`.

Decoders are large programs in C, and files come from anyone. So they run in a process of their own that has read
its input, opens no file and no socket from then on, and whose memory and processor time are bounded.
It reads a file from its standard input, and writes messages, each behind its length in four bytes: an empty one
when it has started, a `Heard`, then the features of each piece as they are read.
"""

from __future__ import annotations

import importlib
import io
import pkgutil
import resource
import sys
import wave
from itertools import chain
from typing import BinaryIO

import av
import msgspec
import numpy as np
from numpy.typing import NDArray

from pagoda.plugins.transcription.log_mel import LogMel
from pagoda.plugins.transcription.messages import ChildOptions, Heard, Piece

_MEMORY_BYTES = 2 * 2**30
_PROCESSOR_S = 300
_LOUDNESS_S = 0.1
"""Seconds of which the energy is compared where audio is cut."""
_MAGIC = (
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
    (4, b"ftyp", "mp4"),
    (0, b"ID3", "mp3"),
    (0, b"\x00\x00\x01\xba", "mpeg"),
)
"""Place and beginning of files of each container. Playlists, which name other files, are none of these."""


class AudioError(Exception):
    """The file cannot be heard; the text is the rule that it breaks."""


def load() -> None:
    """Loads what decoding may need: libraries read parts of themselves when something first needs them."""
    for module in pkgutil.walk_packages(av.__path__, "av."):
        if not module.name.endswith(("__main__", ".datasets")):
            importlib.import_module(module.name)
    file = io.BytesIO()
    with wave.open(file, "wb") as silence:
        silence.setparams((1, 2, 8000, 0, "NONE", ""))
        silence.writeframes(bytes(1600))
    decoded(file.getvalue(), 16_000, 1)


def confine() -> None:
    """Takes from this process what decoding does not need."""
    for what, limit in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_CPU, _PROCESSOR_S),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 0),  # what is open stays so
    ):
        resource.setrlimit(what, (limit, limit))


def container_of(data: bytes) -> str:
    """Name of the container of a file, for libavformat. Raises AudioError: it is none that is decoded."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    for place, magic, name in _MAGIC:
        if data[place : place + len(magic)] == magic:
            return name
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        return "aac" if data[1] & 0xF6 == 0xF0 else "mp3"
    raise AudioError(
        "must be audio of the format flac, mp3, mp4, m4a, mpeg, mpga, ogg, wav or webm"
    )


def decoded(data: bytes, rate: int, max_s: int) -> NDArray[np.int16]:
    """Samples [n] of a file's first audio, all channels together.
    Raises AudioError: it has none, is damaged, or lasts too long."""
    parts: list[NDArray[np.int16]] = []
    count = 0
    try:
        with av.open(io.BytesIO(data), format=container_of(data), metadata_errors="ignore") as file:
            if not file.streams.audio:
                raise AudioError("has no audio in it")
            stream = file.streams.audio[0]
            stream.codec_context.thread_type = "NONE"
            resampler = av.AudioResampler(format="s16", layout="mono", rate=rate)
            for frame in chain(file.decode(stream), (None,)):
                for part in resampler.resample(frame):
                    samples = part.to_ndarray()[0]
                    parts.append(samples)
                    count += len(samples)
                    if count > max_s * rate:
                        raise AudioError(f"must not be longer than {max_s} s")
    except (av.error.FFmpegError, ValueError, MemoryError, EOFError):
        raise AudioError("cannot be decoded: it is damaged, or no audio") from None
    if not count:
        raise AudioError("has no audio in it")
    return np.concatenate(parts)


def cut(samples: NDArray[np.int16], rate: int, most: int, search: int) -> list[Piece]:
    """Pieces of at most `most` samples, each cut where the last `search` of them are quietest."""
    pieces: list[Piece] = []
    first, step = 0, max(1, int(_LOUDNESS_S * rate))
    search = min(search, most // 2)
    while len(samples) - first > most:
        begin = first + most - search
        windows = samples[begin : begin + search // step * step].reshape(-1, step)
        energies = np.square(windows, dtype=np.float64).sum(1)
        end = begin + int(energies.argmin()) * step + step // 2
        pieces.append(Piece(first, end))
        first = end
    return [*pieces, Piece(first, len(samples))]


def _write(out: BinaryIO, message: bytes) -> None:
    out.write(len(message).to_bytes(4, "little"))
    out.write(message)
    out.flush()


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=ChildOptions)
    spec, out = options.features, sys.stdout.buffer
    log_mel = LogMel(spec)
    log_mel(np.zeros(0, np.float32))
    load()
    _write(out, b"")
    data = sys.stdin.buffer.read()
    confine()
    try:
        samples = decoded(data, spec.rate, options.max_s)
    except AudioError as error:
        _write(out, msgspec.json.encode(Heard(error=str(error))))
        return
    pieces = cut(samples, spec.rate, spec.samples, options.search_s * spec.rate)
    _write(out, msgspec.json.encode(Heard(len(samples) / spec.rate, pieces)))
    for piece in pieces:
        part = samples[piece.first : piece.end] / np.float32(2**15)
        _write(out, log_mel(part).tobytes())


if __name__ == "__main__":
    main()
