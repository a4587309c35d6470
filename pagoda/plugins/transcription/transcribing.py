# SPDX-License-Identifier: Apache-2.0
"""The pieces of an audio on their way to text, several at a time, in their order."""

from __future__ import annotations

import asyncio
import math
import zlib
from array import array
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import msgspec

from pagoda.api.errors import GenerationError
from pagoda.errors import OverloadedError, refuse
from pagoda.messages.audio import Alignment, SpeechRules
from pagoda.messages.encoder_input import EncoderInput
from pagoda.messages.frontend import Pooling
from pagoda.messages.sampling_params import SamplingParams
from pagoda.plugins.transcription.decoding import DecodedAudio, piece_seconds
from pagoda.plugins.transcription.form import TranscriptionForm
from pagoda.plugins.transcription.words import Word, words_of
from pagoda.telemetry.request_tracker import ClientRequest
from pagoda.text.draft import Draft
from pagoda.text.speech_files import SpeechTask, SpeechText
from pagoda.text.text_generator import TextDelta, TextGenerator

_AHEAD = 8
"""Pieces of an audio that are transcribed at a time."""
CHARS_OF_TOKEN = 16
"""Characters of a text that takes as long as a token of a transcript with times."""
_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures at which a piece is tried until it is accepted (Radford et al. 2022, part 4.5)."""
_MAX_COMPRESSION, _LEAST_LOGPROB, _MAX_NO_SPEECH = 2.4, -1.0, 0.6
"""Thresholds of a transcript that repeats itself, of one that is unsure, and of silence (openai-whisper)."""


@dataclass(eq=False)
class HeardPiece:
    """A piece, and what is said in it so far."""

    index: int
    start: float
    end: float
    positions: int
    """Positions that the encoder makes of it."""
    temperature: float = 0.0
    """Temperature of the transcript."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    no_speech: float | None = None
    """Probability that nobody speaks, once it is known."""
    words: list[Word] = field(default_factory=list)
    """Words, if they are asked for."""
    deltas: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    """Further text of the piece, once it is certain; None at its end."""

    def begin(self, temperature: float) -> None:
        """Forgets what was said, and begins anew."""
        self.temperature = temperature
        self.token_ids, self.logprobs, self.text = [], [], ""

    def add(self, delta: TextDelta) -> None:
        """Takes what has been said further."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += [it.logprob for it in delta.logprobs or ()]

    @property
    def avg_logprob(self) -> float:
        """Mean log-probability of the tokens, with the one that ends them."""
        return sum(self.logprobs) / max(1, len(self.logprobs))

    def spoken(self, speech: SpeechText) -> list[int]:
        """Tokens of text."""
        return [token_id for token_id in self.token_ids if token_id < speech.end]


def compression_ratio(text: str) -> float:
    """Bytes of a text for each byte that zlib makes of them: many of one that repeats itself."""
    said = text.strip().encode()
    return len(said) / len(zlib.compress(said))


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
        self._tries = form.temperature == 0
        self._begun = False
        sampling = SamplingParams(
            temperature=form.temperature, seed=form.seed, max_tokens=None, logprobs=0
        )
        self._sampling = generator.check_sampling(sampling)

    async def read_prompt(self) -> None:
        """Reads what was said before. Raises InvalidRequestError: the form asks for what there is not."""
        form, speech = self.form, self.speech
        if form.shows("word") and not speech.alignment_heads:
            refuse(
                "timestamp_granularities",
                "must be segment: generation_config.json of the model names no alignment_heads",
            )
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
                    positions = max(1, (piece.end - piece.first) // (2 * self.speech.features.hop))
                    heard = HeardPiece(index, *piece_seconds(piece, rate), positions)
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

    async def _transcribe(self, heard: HeardPiece, features: EncoderInput) -> None:
        try:
            if self.form.response_format == "verbose_json":
                await self._find_silence(heard, features)
            for temperature in _TEMPERATURES if self._tries else (self.form.temperature,):
                heard.begin(temperature)
                await self._say(heard, features)
                if not self._tries or await self._is_accepted(heard, features):
                    break
            if self.form.shows("word"):
                await self._find_words(heard, features)
            if self._tries:
                heard.deltas.put_nowait(heard.text)
        finally:
            heard.deltas.put_nowait(None)

    async def _say(self, heard: HeardPiece, features: EncoderInput) -> None:
        """Transcribes a piece at its temperature."""
        prompt = self.speech.prompt(self.task, self.language, has_times=self.form.has_times)
        draft = self._draft(features, self.speech.rules(has_times=self.form.has_times))
        sampling = msgspec.structs.replace(self._sampling, temperature=heard.temperature)
        if self._tries and sampling.seed is None:
            # What is heard anew at a higher temperature is the same for the same audio.
            seed = int.from_bytes(features.digest[:8], "little", signed=True)
            sampling = msgspec.structs.replace(sampling, seed=seed)
        waits = self._begun or heard.index > 0
        async for delta in self._answer([*self._before, *prompt], sampling, draft, waits=waits):
            heard.add(delta)
            if not self._tries:
                heard.deltas.put_nowait(delta.text)

    async def _is_accepted(self, heard: HeardPiece, features: EncoderInput) -> bool:
        """False if a piece is to be tried at a higher temperature; what is silence is left without text."""
        is_unsure = heard.avg_logprob < _LEAST_LOGPROB
        if is_unsure:
            await self._find_silence(heard, features)
            if (heard.no_speech or 0.0) > _MAX_NO_SPEECH:
                heard.begin(heard.temperature)
                return True
        decode, spoken = self.generator.text.tokenizer.decode, heard.spoken(self.speech)
        return not is_unsure and compression_ratio(decode(spoken)) <= _MAX_COMPRESSION

    async def _find_silence(self, heard: HeardPiece, features: EncoderInput) -> None:
        """Finds the probability that nobody speaks in a piece, if the model has a token for it."""
        if heard.no_speech is None and self.speech.no_speech is not None:
            waits = self._begun or heard.index > 0
            before, token_ids = self._before, (self.speech.no_speech,)
            _, logprob = await self._first_of(features, token_ids, before, waits=waits)
            heard.no_speech = math.exp(logprob)

    async def _find_words(self, heard: HeardPiece, features: EncoderInput) -> None:
        """Finds the times of the words of a piece."""
        speech, generator = self.speech, self.generator
        prompt = speech.prompt(self.task, self.language, has_times=False)
        spoken = heard.spoken(speech)[: generator.endpoint.limits.max_model_len - len(prompt)]
        if not spoken:
            return
        # A token is said where the one in front of it is left: the first of text behind the last of the prompt.
        alignment = Alignment(speech.alignment_heads, len(prompt) - 1, heard.positions)
        draft = replace(self._draft(features), pooling=Pooling.PLACES, alignment=alignment)
        sampling = generator.check_sampling(SamplingParams(temperature=0, seed=0, max_tokens=0))
        places = array("f")
        async for delta in self._answer([*prompt, *spoken], sampling, draft, waits=True):
            places.frombytes(delta.embedding or b"")
        if len(places) != len(spoken) + 1:
            raise GenerationError("an audio gave no places of its tokens")
        times = [place * speech.step_s for place in places]
        decode = generator.text.tokenizer.decode
        heard.words = await generator.run_sized(
            lambda: words_of(spoken, times, decode, self.language), CHARS_OF_TOKEN * len(spoken)
        )

    async def _language_of(self, features: EncoderInput) -> str:
        """The likeliest language of a piece."""
        codes = {token_id: code for code, token_id in self.speech.languages.items()}
        token_id, _ = await self._first_of(features, tuple(codes), waits=False)
        return codes[token_id]

    async def _first_of(
        self,
        features: EncoderInput,
        token_ids: tuple[int, ...],
        before: Sequence[int] = (),
        *,
        waits: bool,
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
        checked, draft = self.generator.check_sampling(sampling), self._draft(features)
        prompt = [*before, self.speech.start]
        async for delta in self._answer(prompt, checked, draft, waits=waits):
            for token_id, entry in zip(delta.token_ids, delta.logprobs or (), strict=False):
                return token_id, entry.logprob
        raise GenerationError("an audio gave no token")

    def _draft(self, features: EncoderInput, rules: SpeechRules | None = None) -> Draft:
        client_request = self._client_request
        return Draft(audio=features, speech=rules, speculates=False, client_request=client_request)

    async def _answer(
        self, prompt: Sequence[int], sampling: SamplingParams, draft: Draft, *, waits: bool
    ) -> AsyncIterator[TextDelta]:
        """Deltas of an answer; one that `waits` is asked for again where there is no room for it yet."""
        while True:
            (request,) = await self.generator.prepare(prompt, sampling, draft)
            has_begun = False
            try:
                async with aclosing(self.generator.stream(request)) as deltas:
                    async for delta in deltas:
                        if delta.error is not None:
                            raise GenerationError(f"{request.request.request_id}: {delta.error}")
                        self._begun = has_begun = True
                        yield delta
            except OverloadedError as error:
                # What was heard so far is not lost because the rest has to wait.
                if has_begun or not waits:
                    raise
                await asyncio.sleep(error.retry_after_s)
            else:
                return


async def finished(pieces: AsyncGenerator[HeardPiece, None]) -> list[HeardPiece]:
    """All pieces, with their texts complete."""
    async with aclosing(pieces) as found:
        return [piece async for piece in found]
