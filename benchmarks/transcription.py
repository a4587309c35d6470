# SPDX-License-Identifier: Apache-2.0
"""Pagoda beside transformers and faster-whisper: seconds of a transcript of one audio, in turn on one machine.

`python -m benchmarks.transcription MODEL AUDIO [--peer-python PYTHON --ct2 DIRECTORY]`, where MODEL is a directory
of Whisper, AUDIO a WAV file of 16 kHz, 16 bits and one channel, of at most 30 s, and PYTHON has faster-whisper,
whose files of the same model are in DIRECTORY. Each system is asked once before it is measured, greedily.
"""

from __future__ import annotations

import array
import io
import itertools
import json
import os
import statistics
import subprocess
import time
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.request import Request, urlopen

from cyclopts import App, Parameter

from pagoda.cli.server_process import server_process
from pagoda.ipc.machine import available_cores

_FASTER_WHISPER = """
import json, sys, time
from faster_whisper import WhisperModel
ct2, audio, rounds, cores = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
for kind in ("float32", "int8"):
    model = WhisperModel(ct2, device="cpu", compute_type=kind, cpu_threads=cores)
    for words in (False, True):
        times = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            segments, _ = model.transcribe(
                audio, language="en", beam_size=1, best_of=1, without_timestamps=not words, word_timestamps=words
            )
            text = "".join(segment.text for segment in segments)
            times.append(time.perf_counter() - began)
        print(json.dumps([f"faster-whisper {kind}" + ", words" * words, times[1:], text]), flush=True)
"""
_BOUNDARY = "--------------------------pagoda"
_app = App()
Row = tuple[str, list[float], str]
"""Name of a system, seconds of its rounds, and the text."""


@_app.default
def main(
    model: Path,
    audio: Path,
    *,
    rounds: int = 5,
    pagoda: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    peer_python: str = "",
    ct2: str = "",
) -> None:
    """Prints a line for each system: median seconds, the range, and the text.

    Args:
        model: A Hugging Face directory of a Whisper model.
        audio: The WAV file.
        rounds: How often each system is measured.
        pagoda: Flags of a server to measure besides that of float32; may be repeated.
        peer_python: A Python with faster-whisper.
        ct2: The model as CTranslate2 has it.
    """
    with wave.open(str(audio)) as file:
        if file.getparams()[:3] != (1, 2, 16_000):
            raise SystemExit(f"{audio} must have one channel of 16 bits at 16 kHz.")
        samples = array.array("h", file.readframes(file.getnframes()))
    for name, times, text in _rows(model, audio, samples, rounds, pagoda, peer_python, ct2):
        span = f"{min(times):.2f} – {max(times):.2f}"
        print(f"{name}: {statistics.median(times):.2f} s ({span})  {text.strip()[:60]!r}")


def _rows(
    model: Path,
    audio: Path,
    samples: array.array[int],
    rounds: int,
    pagoda: tuple[str, ...],
    peer_python: str,
    ct2: str,
) -> Iterator[Row]:
    for flags in ("--dtype float32", *pagoda):
        yield from _of_pagoda(model, samples, rounds, flags)
    yield _of_transformers(model, samples, rounds)
    if peer_python:
        command = [peer_python, "-c", _FASTER_WHISPER, ct2, str(audio), str(rounds)]
        cores, environment = str(available_cores()), {**os.environ, "PYTHONPATH": ""}
        done = subprocess.run(
            [*command, cores], stdout=subprocess.PIPE, text=True, check=True, env=environment
        )
        yield from map(json.loads, done.stdout.splitlines())


def _timed(rounds: int, ask: Callable[[int], str]) -> tuple[list[float], str]:
    """Seconds of each round but the first, and the text of the last."""
    times, text = [], ""
    for number in range(rounds + 1):
        began = time.perf_counter()
        text = ask(number)
        times.append(time.perf_counter() - began)
    return times[1:], text


def _of_pagoda(model: Path, samples: array.array[int], rounds: int, flags: str) -> Iterator[Row]:
    words = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    with server_process([str(model), "--log-level", "warning", *flags.split()]) as server:
        url, numbers = f"{server.base_url}/v1/audio/transcriptions", itertools.count()
        for name, fields in (("", {}), (", words", words)):

            def ask(_: int, fields: dict[str, str] = fields) -> str:
                # Audio that was encoded lately is not encoded again: no two have the same loudness.
                loudness = 1 - next(numbers) / 1000
                own = array.array("h", (round(it * loudness) for it in samples))
                return _posted(url, own, {"language": "en", **fields})

            yield f"pagoda {flags}{name}", *_timed(rounds, ask)


def _posted(url: str, samples: array.array[int], fields: dict[str, str]) -> str:
    """The text of an answer."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 16_000, 0, "NONE", ""))
        out.writeframes(samples.tobytes())
    head = f"--{_BOUNDARY}\r\nContent-Disposition: form-data; name="
    parts = [f'{head}"{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields.items()]
    parts += [f'{head}"file"; filename="a.wav"\r\n\r\n'.encode(), file.getvalue()]
    body = b"".join(parts) + f"\r\n--{_BOUNDARY}--\r\n".encode()
    kind = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}
    with urlopen(Request(url, body, kind)) as answer:
        return str(json.load(answer)["text"])


def _of_transformers(model: Path, samples: array.array[int], rounds: int) -> Row:
    import torch
    from tokenizers import Tokenizer
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    torch.set_num_threads(available_cores())
    own: Any = WhisperForConditionalGeneration.from_pretrained(model)
    own = own.float().eval()
    extractor: Any = WhisperFeatureExtractor.from_pretrained(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def ask(_: int) -> str:
        values = torch.tensor(samples) / 2**15
        found = extractor(values.numpy(), sampling_rate=16_000, return_tensors="pt")
        with torch.no_grad():
            ids = own.generate(found.input_features, language="en", do_sample=False, num_beams=1)
        return str(tokenizer.decode(ids[0].tolist()))

    return "transformers float32", *_timed(rounds, ask)


if __name__ == "__main__":
    _app()
