# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import math
from contextlib import aclosing
from functools import partial
from typing import Any

from aiohttp import web

from pagoda.api.http.request_context import RequestContext
from pagoda.api.http.sse import DONE, EventStream, event
from pagoda.api.route import ANSWER, Route
from pagoda.errors import refuse
from pagoda.plugins.transcription.decoding import DecodedAudio
from pagoda.plugins.transcription.form import read_form
from pagoda.plugins.transcription.segments import segments_of, srt, verbose, vtt
from pagoda.plugins.transcription.state import TranscriptionState
from pagoda.plugins.transcription.transcribing import (
    CHARS_OF_TOKEN,
    HeardPiece,
    Transcription,
    finished,
)
from pagoda.text.speech_files import SpeechTask

_TYPES = {"srt": "application/x-subrip; charset=utf-8", "vtt": "text/vtt; charset=utf-8"}
_TEXT = "text/plain; charset=utf-8"


async def transcribe(context: RequestContext, task: SpeechTask) -> web.StreamResponse:
    decoder, request = context.service.state(TranscriptionState).decoder, context.client_request
    with decoder.under_way.admit(context.key_name):
        form, data = await read_form(context)
        generator = context.service.admit(form.model, request)
        speech = generator.text.speech
        if speech is None:
            refuse("model", "transcribes no audio")
        transcription = Transcription(generator, speech, form, task, request)
        await transcription.read_prompt()
        left_s = request.time_left_s(generator.tracker.clock_ns())
        with generator.endpoint.hold(request.body_id):
            async with decoder.opened(data, speech.features, left_s) as audio:
                del data
                if form.stream:
                    return await context.stream(partial(_stream, transcription, audio))
                pieces = await finished(transcription.pieces(audio))
        return await _whole(context, transcription, audio, pieces)


async def _stream(transcription: Transcription, audio: DecodedAudio, stream: EventStream) -> None:
    """Text as it grows, then all of it."""
    text = ""
    async with aclosing(transcription.pieces(audio)) as pieces:
        async for piece in pieces:
            while (delta := await piece.deltas.get()) is not None:
                # What a text begins with is no part of it.
                added = delta if text else delta.lstrip()
                if added:
                    text += added
                    await stream.send(event({"type": "transcript.text.delta", "delta": added}))
    await stream.send(event({"type": "transcript.text.done", "text": text}) + DONE)


async def _whole(
    context: RequestContext,
    transcription: Transcription,
    audio: DecodedAudio,
    pieces: list[HeardPiece],
) -> web.StreamResponse:
    form, speech = transcription.form, transcription.speech
    if not form.has_times:
        text = "".join(piece.text for piece in pieces).strip()
        if form.response_format == "text":
            return context.text(f"{text}\n", _TEXT)
        return context.json({"text": text, "usage": _usage(audio)})
    generator = transcription.generator
    decode = generator.text.tokenizer.decode
    size = sum(len(piece.token_ids) for piece in pieces)
    segments = await generator.run_sized(
        lambda: list(segments_of(pieces, speech, decode)), CHARS_OF_TOKEN * size
    )
    if form.response_format in _TYPES:
        write = srt if form.response_format == "srt" else vtt
        return context.text(write(segments), _TYPES[form.response_format])
    rate = speech.features.rate / speech.features.hop
    shown = await generator.run_sized(lambda: verbose(segments, rate), CHARS_OF_TOKEN * size)
    answer: dict[str, Any] = {
        "task": transcription.task,
        "language": transcription.language or "en",
        "duration": round(audio.seconds, 3),
        "text": "".join(it.text for it in segments).strip(),
        **({"segments": shown} if form.shows("segment") else {}),
        **({"words": _words(pieces)} if form.shows("word") else {}),
        "usage": _usage(audio),
    }
    return await context.sized_json(answer, CHARS_OF_TOKEN * size)


def _words(pieces: list[HeardPiece]) -> list[dict[str, Any]]:
    """Words as OpenAI shows them."""
    return [
        {
            "word": word.text.strip(),
            "start": round(min(piece.start + word.start, piece.end), 3),
            "end": round(min(piece.start + word.end, piece.end), 3),
        }
        for piece in pieces
        for word in piece.words
    ]


def _usage(audio: DecodedAudio) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(audio.seconds)}


def _route(task: SpeechTask, summary: str) -> dict[str, Route]:
    handler = partial(transcribe, task=task)
    return {
        "POST": Route(
            handler, summary, ANSWER, takes_form=True, streams=True, is_queued=True, statuses=(501,)
        )
    }


ROUTES: dict[str, dict[str, Route]] = {
    "/v1/audio/transcriptions": _route("transcribe", "Transcript of an audio."),
    "/v1/audio/translations": _route("translate", "English text of an audio."),
}
