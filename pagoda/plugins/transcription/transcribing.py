# SPDX-License-Identifier: Apache-2.0
"""The pieces of an audio on their way to text, several at a time, in their order."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from pagoda.api.errors import GenerationError
from pagoda.errors import OverloadedError, refuse
from pagoda.messages.audio import AudioFeatures
from pagoda.messages.sampling_params import SamplingParams
from pagoda.plugins.transcription.decoding import DecodedAudio, piece_seconds
from pagoda.plugins.transcription.form import TranscriptionForm
from pagoda.telemetry.request_tracker import ClientRequest
from pagoda.text.draft import Draft
from pagoda.text.speech_files import SpeechTask, SpeechText
from pagoda.text.text_generator import TextDelta, TextGenerator

_AHEAD = 8
"""Pieces of an audio that are transcribed at a time."""


@dataclass(eq=False)
class HeardPiece:
    """A piece, and what is said in it so far."""

    index: int
    start: float
    end: float
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    no_speech: float | None = None
    """Probability that nobody speaks, once it is known."""
    deltas: asyncio.Queue[TextDelta | None] = field(default_factory=asyncio.Queue)
    """News of the piece; None at its end."""

    def add(self, delta: TextDelta) -> None:
        """Takes what has been said further."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += [it.logprob for it in delta.logprobs or ()]
        self.deltas.put_nowait(delta)


class Transcription:
    """One audio's way to text."""

    def __init__(
        self,
        generator: TextGenerator,
        speech: SpeechText,
        form: TranscriptionForm,
        task: SpeechTask,
        client_request: ClientRequest,
    ) -> None:
        self.generator, self.speech, self.form, self.task = generator, speech, form, task
        self.language = form.language
        self._client_request = client_request
        self._before: list[int] = []
        shown = form.response_format == "verbose_json"
        self._no_speech = speech.no_speech if shown else None
        sampling = SamplingParams(
            temperature=form.temperature,
            seed=form.seed,
            max_tokens=None,
            logprobs=0 if form.has_times else None,
        )
        self._sampling = generator.check_sampling(sampling)

    async def read_prompt(self) -> None:
        """Reads what was said before. Raises InvalidRequestError: the form's language or prompt is wrong."""
        form, speech = self.form, self.speech
        if form.language is not None:
            speech.prompt(self.task, form.language, has_times=form.has_times)
        if not form.prompt:
            return
        if speech.previous is None:
            refuse("prompt", "must be empty: the model takes nothing that was said before")
        text = f" {form.prompt.strip()}"
        tokens = await self.generator.encode(text, add_special_tokens=False, param="prompt")
        most = self.generator.endpoint.limits.max_model_len // 2 - 1
        self._before = [speech.previous, *tokens[-most:]]

    async def pieces(self, audio: DecodedAudio) -> AsyncGenerator[HeardPiece, None]:
        """Pieces in their order, each as soon as its text may begin; their texts grow as they are read.
        Raises GenerationError: the engine failed with a request; what `DecodedAudio.features` raises."""
        rate = self.speech.features.rate
        waiting = deque(enumerate(audio.pieces))
        running: deque[tuple[HeardPiece, asyncio.Task[None]]] = deque()
        try:
            while waiting or running:
                while waiting and len(running) < _AHEAD:
                    index, piece = waiting.popleft()
                    features = await audio.features()
                    if self.language is None and self.speech.languages:
                        self.language = await self._language_of(features)
                    heard = HeardPiece(index, *piece_seconds(piece, rate))
                    task = asyncio.create_task(self._transcribe(heard, features))
                    running.append((heard, task))
                heard, task = running[0]
                yield heard
                await task
                running.popleft()
        finally:
            for _, task in running:
                task.cancel()
            await asyncio.gather(*(task for _, task in running), return_exceptions=True)

    async def _transcribe(self, heard: HeardPiece, features: AudioFeatures) -> None:
        try:
            prompt = self.speech.prompt(self.task, self.language, has_times=self.form.has_times)
            draft = Draft(
                audio=features,
                speech=self.speech.rules(has_times=self.form.has_times),
                speculates=False,
                client_request=self._client_request,
            )
            while True:
                try:
                    if heard.no_speech is None and self._no_speech is not None:
                        _, logprob = await self._first_of(features, (self._no_speech,))
                        heard.no_speech = math.exp(logprob)
                    async for delta in self._answer(
                        [*self._before, *prompt], self._sampling, draft
                    ):
                        heard.add(delta)
                except OverloadedError as error:
                    # The pieces in front of it are not lost because this one has to wait.
                    if heard.index == 0 or heard.token_ids:
                        raise
                    await asyncio.sleep(error.retry_after_s)
                else:
                    break
        finally:
            heard.deltas.put_nowait(None)

    async def _language_of(self, features: AudioFeatures) -> str:
        """The likeliest language of a piece."""
        codes = {token_id: code for code, token_id in self.speech.languages.items()}
        token_id, _ = await self._first_of(features, tuple(codes))
        return codes[token_id]

    async def _first_of(
        self, features: AudioFeatures, token_ids: tuple[int, ...]
    ) -> tuple[int, float]:
        """The likeliest of `token_ids` in front of a transcript, and its log-probability among all tokens."""
        sampling = SamplingParams(
            temperature=0,
            seed=0,
            max_tokens=1,
            logprobs=0,
            allowed_token_ids=token_ids,
            ignore_eos=True,
        )
        draft = Draft(audio=features, speculates=False, client_request=self._client_request)
        checked = self.generator.check_sampling(sampling)
        async for delta in self._answer([self.speech.start], checked, draft):
            for token_id, entry in zip(delta.token_ids, delta.logprobs or (), strict=False):
                return token_id, entry.logprob
        raise GenerationError("an audio gave no token")

    async def _answer(
        self, prompt: Sequence[int], sampling: SamplingParams, draft: Draft
    ) -> AsyncIterator[TextDelta]:
        (request,) = await self.generator.prepare(prompt, sampling, draft)
        async with aclosing(self.generator.stream(request)) as deltas:
            async for delta in deltas:
                if delta.error is not None:
                    raise GenerationError(f"{request.request.request_id}: {delta.error}")
                yield delta


async def finished(pieces: AsyncGenerator[HeardPiece, None]) -> list[HeardPiece]:
    """All pieces, with their texts complete."""
    async with aclosing(pieces) as found:
        return [piece async for piece in found]
