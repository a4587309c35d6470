# SPDX-License-Identifier: Apache-2.0
"""Files of all formats are decoded, and hostile ones end in a sentence."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import subprocess
import sys

import av
import numpy as np
import pytest
from speech_models import RATE, sound, wav

from pagoda.api.errors import ApiError
from pagoda.concurrency import event_loop
from pagoda.errors import InvalidRequestError
from pagoda.messages.audio import FeatureSpec
from pagoda.plugins.transcription import decoding
from pagoda.plugins.transcription.child import AudioError, container_of, cut, decoded
from pagoda.plugins.transcription.decoding import AudioDecoder, DecodedAudio
from pagoda.plugins.transcription.log_mel import LogMel

SPEC = FeatureSpec(20, 300, RATE, 400, 160)
"""Pieces of three seconds."""
SAMPLES = sound(7.0)
FORMATS = {
    "flac": ("flac", "flac"),
    "mp3": ("mp3", "mp3"),
    "mp4": ("mp4", "aac"),
    "ogg": ("ogg", "libopus"),
    "webm": ("webm", "libopus"),
    "wav": ("wav", "pcm_s16le"),
    "aac": ("adts", "aac"),
}


def encoded(container: str, codec: str, layout: str = "mono") -> bytes:
    """`SAMPLES` in a file."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        rate = 48_000 if codec == "libopus" else RATE
        stream = out.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(SAMPLES[None], format="s16", layout="mono")
        frame.sample_rate = RATE
        resampler = av.AudioResampler(
            format=stream.format, layout=layout, rate=rate, frame_size=stream.frame_size or None
        )
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    found = decoded(encoded(*FORMATS[name]), RATE, 60)
    assert abs(len(found) - len(SAMPLES)) < 0.2 * RATE
    power = np.square(found / 2**15).mean() / np.square(SAMPLES / 2**15).mean()
    assert 0.5 < power < 1.5
    if name in ("flac", "wav"):
        assert (found == SAMPLES).all()


def test_channels_are_heard_together() -> None:
    found = decoded(encoded("flac", "flac", "stereo"), RATE, 60)
    assert abs(len(found) - len(SAMPLES)) < 100


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"RIFF\0\0\0\0WAVE",
        b"fLaC" + bytes(100),
        encoded("mp4", "aac")[:1000],
        bytes([0xFF, 0xFB]) * 50,
    ],
    ids=["empty", "playlist", "list", "wav", "flac", "cut", "mp3"],
)
def test_what_is_no_audio_is_refused(data: bytes) -> None:
    with pytest.raises(AudioError):
        decoded(data, RATE, 60)


def test_playlists_are_no_containers() -> None:
    with pytest.raises(AudioError, match="must be audio of the format flac"):
        container_of(b"#EXTM3U\n")


def test_long_audio_is_refused() -> None:
    with pytest.raises(AudioError, match="must not be longer than 6 s"):
        decoded(wav(SAMPLES), RATE, 6)


def test_audio_is_cut_where_it_is_quiet() -> None:
    samples = SAMPLES.copy()
    samples[int(2.4 * RATE) : int(2.6 * RATE)] = 0
    first, *others = cut(samples, RATE, 3 * RATE, RATE)
    assert 2.4 * RATE < first.end < 2.6 * RATE
    ends = [first.end, *(piece.end for piece in others)]
    assert [piece.first for piece in others] == ends[:-1]
    assert ends[-1] == len(samples)
    assert all(piece.end - piece.first <= 3 * RATE for piece in others)


@pytest.mark.parametrize("what", ["open('/etc/hostname')", "socket.socket()"])
def test_a_confined_process_opens_nothing(what: str) -> None:
    code = f"import socket; from pagoda.plugins.transcription import child; child.confine(); {what}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Too many open files" in done.stderr


async def _features(data: bytes) -> tuple[DecodedAudio, list[bytes]]:
    async with AudioDecoder().opened(data, SPEC) as audio:
        return audio, [(await audio.features()).values for _ in audio.pieces]


async def test_a_process_gives_features_of_each_piece() -> None:
    audio, features = await _features(wav(SAMPLES))
    assert audio.seconds == 7.0
    assert len(features) == 3
    log_mel = LogMel(SPEC)
    for piece, values in zip(audio.pieces, features, strict=True):
        part = SAMPLES[piece.first : piece.end].astype(np.float32) / 2**15
        assert values == log_mel(part).tobytes()


def test_what_nobody_reads_ends_with_its_request() -> None:
    """As at a client's disconnect: the process has pieces left to tell, on the event loops of both kinds."""

    async def leave() -> None:
        decoder = AudioDecoder()
        for _ in range(3):
            async with decoder.opened(wav(sound(40.0)), SPEC) as audio:
                await audio.features()

    asyncio.run(leave())
    event_loop.run(leave())


def test_audios_under_way_are_bounded_of_all_and_of_a_key() -> None:
    under_way = AudioDecoder().under_way
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(under_way.admit("one"))
        with pytest.raises(ApiError, match="key one may send 64 audios"):
            stack.enter_context(under_way.admit("one"))
        for _ in range(64):
            stack.enter_context(under_way.admit(""))
        with pytest.raises(ApiError, match="takes 128 audios"):
            stack.enter_context(under_way.admit("other"))
    assert under_way.num_running == 0


async def test_a_decoder_that_does_not_start_is_no_fault_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoding, "_CHILD", "pagoda.no_such_module")
    with pytest.raises(ApiError, match="did not start"):
        await _features(wav(SAMPLES))


async def test_hostile_files_end_in_a_sentence() -> None:
    """Damaged at random places, they are heard or refused, and nothing else."""
    rng = random.Random(1)
    for container, codec in (("mp4", "aac"), ("ogg", "libopus")):
        data = bytearray(encoded(container, codec))
        for _ in range(60):
            data[rng.randrange(8, len(data))] = rng.randrange(256)
        with contextlib.suppress(InvalidRequestError):
            await _features(bytes(data))


async def test_a_process_that_dies_is_the_files_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.plugins.transcription.decoding._CHILD", "this")
    with pytest.raises(InvalidRequestError, match="file cannot be decoded"):
        await _features(wav(SAMPLES))
