# SPDX-License-Identifier: Apache-2.0
"""A server transcribes as transformers does, in all formats that OpenAI has, asked by OpenAI's client too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import openai
import pytest
import torch
from speech_models import (
    END,
    FIRST_TIME,
    PIECE_S,
    RATE,
    feature_extractor,
    save_speech_model,
    sound,
    wav,
)
from tokenizers import Tokenizer
from transformers.generation import GenerateEncoderDecoderOutput
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from pagoda.cli.server_process import server_process
from pagoda.plugins.transcription.words import words_of

_START, _ENGLISH, _GERMAN, _TRANSLATE, _TRANSCRIBE, _, _PREVIOUS, _NO_SPEECH = range(
    END + 1, END + 9
)
_CONTEXT = 61
SHORT = sound(1.2, seed=1)


class Speech:
    """A server of a tiny Whisper, and the same model in transformers."""

    def __init__(self, directory: Path, url: str, model: Any) -> None:
        self.model, self.url = model, url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def ask(self, samples: Any = SHORT, **fields: Any) -> Any:
        return self.client.audio.transcriptions.create(
            model=fields.pop("model", "tiny"), file=("a.wav", wav(samples)), **fields
        )

    def first_logits(self) -> torch.Tensor:
        """Logits [vocabulary] of `SHORT` in front of a transcript."""
        features = feature_extractor()(
            SHORT.astype("float32") / 2**15, sampling_rate=RATE, return_tensors="pt"
        ).input_features
        with torch.no_grad():
            logits = self.model(features, decoder_input_ids=torch.tensor([[_START]])).logits
        first: torch.Tensor = logits[0, -1]
        return first

    def tokens(self, samples: Any, prompt: list[int], *, has_times: bool) -> list[int]:
        """The greedy transcript behind a prompt."""
        rules, begin = self.model.generation_config, len(prompt)
        first = FIRST_TIME if has_times else FIRST_TIME - 1
        banned = [*range(first, self.model.config.vocab_size)] if not has_times else []
        processors = [
            SuppressTokensLogitsProcessor([*rules.suppress_tokens, *banned]),
            SuppressTokensAtBeginLogitsProcessor(rules.begin_suppress_tokens, begin),
        ]
        if has_times:
            rules.bos_token_id = END
            processors.append(WhisperTimeStampLogitsProcessor(rules, begin))
        features = feature_extractor()(
            samples.astype("float32") / 2**15, sampling_rate=RATE, return_tensors="pt"
        ).input_features
        ids = torch.tensor([prompt])
        with torch.no_grad():
            encoded = self.model.model.encoder(features)
            while ids.shape[1] < _CONTEXT:
                scores = self.model(encoder_outputs=encoded, decoder_input_ids=ids).logits[:, -1]
                for process in processors:
                    scores = process(ids, scores)
                token_id = int(scores.argmax())
                if token_id == END:
                    break
                ids = torch.cat([ids, torch.tensor([[token_id]])], 1)
        return ids[0, begin:].tolist()

    def text(self, samples: Any, prompt: list[int]) -> str:
        tokens = self.tokens(samples, [*prompt, FIRST_TIME - 1], has_times=False)
        return str(self.tokenizer.decode(tokens))


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speech]:
    directory = tmp_path_factory.mktemp("speech")
    model = save_speech_model(directory)
    flags = (str(directory), "--served-model-name", "tiny", "--log-level", "warning")
    with server_process(flags) as server:
        yield Speech(directory, server.base_url, model)


def test_transcripts_are_those_of_transformers(speech: Speech) -> None:
    prompt = [_START, _ENGLISH, _TRANSCRIBE]
    expected = speech.text(SHORT, prompt).strip()
    assert expected
    answer = speech.ask(language="en")
    assert answer.text == expected
    assert answer.usage.model_dump() == {"type": "duration", "seconds": 2.0}
    assert speech.ask(language="en", response_format="text") == f"{expected}\n"
    before = [_PREVIOUS, *speech.tokenizer.encode(" Hello").ids]
    prompted = speech.text(SHORT, [*before, *prompt]).strip()
    assert speech.ask(language="en", prompt="Hello").text == prompted
    german = speech.text(SHORT, [_START, _GERMAN, _TRANSCRIBE]).strip()
    assert speech.ask(language="de").text == german
    assert len({expected, prompted, german}) == 3


def test_translations_and_the_language_that_is_found(speech: Speech) -> None:
    logits = speech.first_logits()
    language = max((_ENGLISH, _GERMAN), key=lambda token: float(logits[token]))
    expected = speech.text(SHORT, [_START, language, _TRANSLATE]).strip()
    file = ("a.wav", wav(SHORT))
    assert speech.client.audio.translations.create(model="tiny", file=file).text == expected
    found = speech.ask(response_format="verbose_json").language
    assert found == {_ENGLISH: "en", _GERMAN: "de"}[language]


def test_long_audio_is_streamed_piece_by_piece(speech: Speech) -> None:
    samples = sound(3.7, seed=2)
    whole = speech.ask(samples, language="en").text
    verbose = speech.ask(samples, language="en", response_format="verbose_json")
    assert verbose.duration == pytest.approx(3.7)
    assert {segment.seek for segment in verbose.segments} >= {0}
    assert len({segment.seek for segment in verbose.segments}) == 3
    events = list(speech.ask(samples, language="en", stream=True))
    *deltas, done = events
    assert [event.type for event in deltas] == ["transcript.text.delta"] * len(deltas)
    assert len(deltas) == 3  # each piece, once it is accepted
    assert done.type == "transcript.text.done"
    assert "".join(delta.delta for delta in deltas) == done.text
    assert done.text.strip() == whole
    hot: dict[str, Any] = {"temperature": 0.3, "extra_body": {"seed": 1}}
    *deltas, done = speech.ask(samples, language="en", stream=True, **hot)
    assert len(deltas) > 3
    assert done.text.strip() == speech.ask(samples, language="en", **hot).text


def test_segments_have_the_times_that_were_said(speech: Speech) -> None:
    tokens = speech.tokens(SHORT, [_START, _ENGLISH, _TRANSCRIBE], has_times=True)
    times = [min((it - FIRST_TIME) / 50, 1.2) for it in tokens if it >= FIRST_TIME]
    no_speech = float(speech.first_logits().softmax(-1)[_NO_SPEECH])
    assert len(times) > 1
    answer = speech.ask(
        language="en", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (answer.task, answer.language) == ("transcribe", "en")
    assert answer.segments
    for segment in answer.segments:
        assert segment.text == speech.tokenizer.decode(segment.tokens)
        assert segment.no_speech_prob == pytest.approx(no_speech, rel=1e-3)
        assert {segment.start, segment.end} <= {*times, 0.0, 1.2}
        assert segment.avg_logprob < 0 < segment.compression_ratio
        assert segment.temperature == 0
    assert answer.text == "".join(segment.text for segment in answer.segments).strip()
    srt = speech.ask(language="en", response_format="srt")
    assert srt.startswith("1\n00:00:0")
    assert srt.count(" --> ") == len(answer.segments)
    vtt = speech.ask(language="en", response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n00:00:0")
    assert vtt.count(" --> ") == len(answer.segments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"language": "xx"}, "language must be one of de, en."),
        ({"response_format": "xml"}, "response_format: invalid enum value 'xml'."),
        ({"temperature": 3}, "temperature: expected `float` <= 1.0."),
        ({"stream": True, "response_format": "srt"}, "stream goes with the response_format"),
        ({"timestamp_granularities": ["segment"]}, "timestamp_granularities needs the"),
        ({"extra_body": {"chunking": "no"}}, "chunking is not a known field."),
        ({"model": "other"}, "The model 'other' is not served here"),
    ],
)
def test_fields_that_are_wrong_are_named(
    fields: dict[str, Any], message: str, speech: Speech
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        speech.ask(**fields)
    assert refused.value.status_code in (400, 404)
    assert refused.value.response.json()["error"]["message"].startswith(message)


def test_words_have_the_times_of_their_tokens(speech: Speech) -> None:
    """Those of the last piece begin where the one in front of it ends."""
    samples = np.concatenate([SHORT, sound(1.2, seed=3)])
    fields: dict[str, Any] = {"language": "en", "response_format": "verbose_json"}
    answer = speech.ask(samples, timestamp_granularities=["word", "segment"], **fields)
    last = answer.segments[-1].seek
    begins = last / 100
    tokens = [it for part in answer.segments if part.seek == last for it in part.tokens]
    features = feature_extractor()(
        samples[round(begins * RATE) :].astype("float32") / 2**15,
        sampling_rate=RATE,
        return_tensors="pt",
    ).input_features
    prompt = [_START, _ENGLISH, _TRANSCRIBE, FIRST_TIME - 1]
    speech.model.set_attn_implementation("eager")
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *tokens]])
        found = speech.model(features, decoder_input_ids=ids, output_attentions=True)
    times = vars(WhisperGenerationMixin)["_extract_token_timestamps"](
        speech.model,
        GenerateEncoderDecoderOutput(sequences=ids, cross_attentions=(found.cross_attentions,)),
        speech.model.generation_config.alignment_heads,
        num_frames=int((2.4 - begins) * 100 + 1e-6),
        num_input_ids=len(prompt) - 1,
    )[0, len(prompt) - 1 : -1]
    expected = words_of(tokens, times.tolist(), speech.tokenizer.decode, "en")
    words = [it for it in answer.words if it.start >= begins][-len(expected) :]
    assert [it.word for it in words] == [it.text.strip() for it in expected]
    for word, own in zip(words, expected, strict=True):
        assert (word.start, word.end) == pytest.approx(
            (min(begins + own.start, 2.4), min(begins + own.end, 2.4)), abs=2e-3
        )
    alone = speech.ask(samples, timestamp_granularities=["word"], **fields)
    assert (alone.segments, alone.words) == (None, answer.words)


def test_fields_that_change_nothing_are_taken(speech: Speech) -> None:
    """Those that nobody has filled in, what happens anyway, and data about the request."""
    extra = {"chunking_strategy": "auto", "timestamp_granularities[]": "", "session_id": "a"}
    assert speech.ask(language="en", extra_body=extra).text == speech.ask(language="en").text


def test_a_deadline_holds_for_decoding_too(speech: Speech) -> None:
    with pytest.raises(openai.APIStatusError, match="within its timeout"):
        speech.ask(language="en", extra_body={"timeout": "0.001"})


def test_files_that_are_no_audio_are_refused(speech: Speech) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        speech.client.audio.transcriptions.create(model="tiny", file=("a.mp3", b"no audio"))
    error = refused.value.response.json()["error"]
    assert error["param"] == "file"
    assert error["message"].startswith("file must be audio of the format flac, mp3")


def test_other_routes_say_what_to_ask(speech: Speech) -> None:
    with pytest.raises(openai.BadRequestError, match="ask POST /v1/audio/transcriptions"):
        speech.client.completions.create(model="tiny", prompt="hello")


def test_the_routes_are_described(speech: Speech) -> None:
    with urlopen(f"{speech.url}/openapi.json") as answer:
        described = json.load(answer)
    assert {f"/v1/audio/{it}" for it in ("transcriptions", "translations")} <= {*described["paths"]}
    assert feature_extractor().n_samples == PIECE_S * RATE
