# SPDX-License-Identifier: Apache-2.0
"""Pieces that come out bad are tried again where openai-whisper and transformers do so."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncGenerator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from transformers.generation.logits_process import WhisperNoSpeechDetection
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from pagoda.errors import InvalidRequestError, OverloadedError
from pagoda.messages.audio import FeatureSpec
from pagoda.messages.encoder_input import EncoderInput, encoder_input
from pagoda.messages.frontend import TokenLogprobs
from pagoda.messages.sampling_params import SamplingParams
from pagoda.plugins.transcription.decoding import DecodedAudio
from pagoda.plugins.transcription.form import TranscriptionForm
from pagoda.plugins.transcription.messages import Piece
from pagoda.plugins.transcription.transcribing import HeardPiece, Transcription, finished
from pagoda.telemetry.request_tracker import ClientRequest
from pagoda.text.draft import Draft
from pagoda.text.speech_files import SpeechText
from pagoda.text.text_generator import TextDelta, TextGenerator

END, NO_SPEECH = 128, 130
SPEECH = SpeechText(
    FeatureSpec(80, 3000, 16_000, 400, 160),
    *(129, None, NO_SPEECH, 131, 132, END),
    languages={},
    tasks={},
    suppressed=(),
    begin_suppressed=(),
    initial_times=50,
)
VARIED = [*range(33, 97)]
REPEATED = [65] * 64


class Try(NamedTuple):
    """What the model says at a temperature."""

    token_ids: list[int]
    avg_logprob: float

    @property
    def logprobs(self) -> list[float]:
        """Those of the tokens and of the end."""
        return [self.avg_logprob] * (len(self.token_ids) + 1)


GOOD, UNSURE, REPEATS = Try(VARIED, -0.3), Try(VARIED, -1.5), Try(REPEATED, -0.1)
BOTH = Try(REPEATED, -2.0)


class Model:
    """A generator that says what `tries` have for each temperature, and notes what it is asked."""

    def __init__(self, tries: Mapping[float, Try], no_speech: float = 0.0) -> None:
        self.tries, self.no_speech = tries, no_speech
        self.asked: list[SamplingParams] = []
        self.rooms: list[bool] = []
        """Whether there is room for each further request; there is for those behind them."""
        decode = bytes
        self.text = SimpleNamespace(
            tokenizer=SimpleNamespace(decode=lambda ids: decode(ids).decode())
        )

    def check_sampling(self, sampling: SamplingParams) -> SamplingParams:
        return sampling

    async def prepare(self, _: Any, sampling: SamplingParams, __: Draft) -> list[Any]:
        return [SimpleNamespace(sampling=sampling, request=SimpleNamespace(request_id="0"))]

    async def stream(self, request: Any) -> AsyncGenerator[TextDelta, None]:
        if self.rooms and not self.rooms.pop(0):
            raise OverloadedError("full", retry_after_s=0)
        sampling: SamplingParams = request.sampling
        if sampling.allowed_token_ids is not None:
            assert sampling.allowed_token_ids == (NO_SPEECH,)
            yield TextDelta("", [NO_SPEECH], logprobs=_logprobs([math.log(self.no_speech or 1e-9)]))
            return
        self.asked.append(sampling)
        said = self.tries[sampling.temperature]
        for token_id, logprob in zip([*said.token_ids, END], said.logprobs, strict=True):
            text = chr(token_id) if token_id < END else ""
            yield TextDelta(text, [token_id], logprobs=_logprobs([logprob]))


def _logprobs(values: list[float]) -> list[TokenLogprobs]:
    return [TokenLogprobs(value, 1, (), ()) for value in values]


class Audio:
    pieces = (Piece(0, 16_000),)

    async def features(self) -> EncoderInput:
        return encoder_input(b"features")


async def _heard(model: Model, **fields: Any) -> HeardPiece:
    form = TranscriptionForm(**fields)
    client_request = ClientRequest(id="0", arrived_ns=0)
    transcription = Transcription(
        cast(TextGenerator, model), SPEECH, form, "transcribe", client_request
    )
    (piece,) = await finished(transcription.pieces(cast(DecodedAudio, Audio())))
    return piece


def _judged(said: Try, no_speech: float, temperature: float) -> tuple[bool, bool]:
    """Whether transformers tries again, and whether it takes a piece for silence."""
    detection = WhisperNoSpeechDetection(NO_SPEECH, 0, scores_is_logprobs=False)
    vars(detection)["_no_speech_prob"] = [no_speech]
    config = SimpleNamespace(
        compression_ratio_threshold=2.4, logprob_threshold=-1.0, no_speech_threshold=0.6
    )
    ids = torch.tensor([*said.token_ids, END])
    rest = math.log((1 - math.exp(said.avg_logprob)) / 140)
    scores = torch.full((len(ids), 141), rest)
    scores[torch.arange(len(ids)), ids] = said.avg_logprob
    outputs = [{"scores": tuple(scores / (temperature or 1.0))}]
    methods = vars(WhisperGenerationMixin)
    bound = SimpleNamespace(
        **{it: methods[it] for it in ("_retrieve_compression_ratio", "_retrieve_avg_logprobs")}
    )
    judged: tuple[bool, bool] = methods["_need_fallback"](
        bound, ids, outputs, 0, [detection], config, 255, temperature
    )
    return judged


async def test_pieces_are_tried_again_as_transformers_does() -> None:
    temperatures = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    for *first, no_speech in itertools.product(
        *[(GOOD, UNSURE, REPEATS, BOTH)] * 2, (0.1, 0.59, 0.61)
    ):
        tries = dict(zip(temperatures, [*first, UNSURE, BOTH, REPEATS, UNSURE], strict=True))
        for expected in temperatures:
            again, is_silent = _judged(tries[expected], no_speech, expected)
            if not again:
                break
        piece = await _heard(Model(tries, no_speech))
        assert piece.temperature == expected
        text = "" if is_silent else bytes(tries[expected].token_ids).decode()
        assert piece.text == text
        assert [piece.deltas.get_nowait() for _ in range(2)] == [text, None]


async def test_a_given_temperature_is_used_alone() -> None:
    model = Model({0.4: BOTH}, no_speech=0.9)
    piece = await _heard(model, temperature=0.4)
    assert (piece.temperature, piece.text) == (0.4, bytes(REPEATED).decode())
    assert [sampling.seed for sampling in model.asked] == [None]
    assert piece.deltas.qsize() == len(REPEATED) + 2


@pytest.mark.parametrize("seed", [None, 7])
async def test_the_same_audio_is_tried_with_the_same_seeds(seed: int | None) -> None:
    seeds = set()
    for _ in range(2):
        model = Model({0.0: UNSURE, 0.2: REPEATS, 0.4: GOOD})
        await _heard(model, seed=seed)
        assert [sampling.temperature for sampling in model.asked] == [0.0, 0.2, 0.4]
        seeds.update(sampling.seed for sampling in model.asked)
    (one,) = seeds
    assert one == seed if seed is not None else isinstance(one, int)


async def test_a_further_try_waits_for_room() -> None:
    model = Model({0.0: REPEATS, 0.2: GOOD})
    model.rooms = [True, False, False, True]
    assert (await _heard(model)).temperature == 0.2
    model.rooms = [False]
    with pytest.raises(OverloadedError):
        await _heard(model)


async def test_words_of_a_model_without_alignment_heads_are_refused() -> None:
    form = TranscriptionForm(response_format="verbose_json", timestamp_granularities=["word"])
    model = cast(TextGenerator, Model({}))
    transcription = Transcription(
        model, SPEECH, form, "transcribe", ClientRequest(id="0", arrived_ns=0)
    )
    with pytest.raises(InvalidRequestError, match="names no alignment_heads"):
        await transcription.read_prompt()
