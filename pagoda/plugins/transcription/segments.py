# SPDX-License-Identifier: Apache-2.0
"""Segments of transcripts, and files of subtitles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pagoda.plugins.transcription.transcribing import HeardPiece, compression_ratio
from pagoda.text.speech_files import SpeechText


@dataclass(frozen=True)
class Segment:
    """Text that is spoken from one time to another."""

    start: float
    end: float
    text: str
    token_ids: Sequence[int]
    piece: HeardPiece


def segments_of(
    pieces: Iterable[HeardPiece], speech: SpeechText, decode: Callable[[Sequence[int]], str]
) -> Iterator[Segment]:
    """Segments between the times of pieces; one that is not ended lasts as long as its piece."""
    for piece in pieces:
        start, begun, texts = piece.start, [*_with_end(piece, speech)], list[int]()
        for token_id in begun:
            if token_id < speech.end:
                texts.append(token_id)
            elif token_id >= speech.first_time:
                at = piece.start + (token_id - speech.first_time) * speech.step_s
                at = min(at, piece.end)
                if (text := decode(texts)).strip():
                    yield Segment(start, max(start, at), text, texts, piece)
                start, texts = at, []
        if (text := decode(texts)).strip():
            yield Segment(start, piece.end, text, texts, piece)


def _with_end(piece: HeardPiece, speech: SpeechText) -> Iterator[int]:
    """Tokens of a piece up to the one that ends it."""
    for token_id in piece.token_ids:
        if token_id == speech.end:
            return
        yield token_id


def verbose(segments: Sequence[Segment], rate: float) -> list[dict[str, Any]]:
    """Segments as OpenAI shows them, whose figures are those of their pieces; `rate` are frames a second."""
    texts: dict[HeardPiece, str] = {}
    for it in segments:
        texts[it.piece] = texts.get(it.piece, "") + it.text
    figures = {piece.index: _figures(piece, text) for piece, text in texts.items()}
    return [
        {
            "id": index,
            "seek": round(it.piece.start * rate),
            "start": round(it.start, 3),
            "end": round(it.end, 3),
            "text": it.text,
            "tokens": [*it.token_ids],
            "temperature": it.piece.temperature,
            **figures[it.piece.index],
        }
        for index, it in enumerate(segments)
    ]


def _figures(piece: HeardPiece, text: str) -> dict[str, float]:
    return {
        "avg_logprob": piece.avg_logprob,
        "compression_ratio": compression_ratio(text),
        "no_speech_prob": piece.no_speech or 0.0,  # models without a token for it do not say
    }


def srt(segments: Iterable[Segment]) -> str:
    """SubRip."""
    return "".join(
        f"{number}\n{_clock(it.start, ',')} --> {_clock(it.end, ',')}\n{_line(it)}\n\n"
        for number, it in enumerate(segments, start=1)
    )


def vtt(segments: Iterable[Segment]) -> str:
    """WebVTT (https://www.w3.org/TR/webvtt1/)."""
    cues = (
        f"{_clock(it.start, '.')} --> {_clock(it.end, '.')}\n{_line(it)}\n\n" for it in segments
    )
    return f"WEBVTT\n\n{''.join(cues)}"


def _line(segment: Segment) -> str:
    """The text of a cue, in which an arrow would begin another one."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"
