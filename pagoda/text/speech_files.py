# SPDX-License-Identifier: Apache-2.0
"""Files beside a model that hears: how audio becomes features, and the tokens around a transcript."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from pagoda.checkpoints.config_json import read_model_config
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.errors import ConfigError, refuse
from pagoda.files import read_object
from pagoda.messages.audio import FeatureSpec, SpeechRules
from pagoda.text.tokenizers.tokenizer import Tokenizer
from pagoda.whole_numbers import whole_numbers

SpeechTask = Literal["transcribe", "translate"]

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
_INITIAL_TIMES = 50
"""Steps of time, at most, behind which a transcript may begin where files are silent (transformers)."""


@dataclass(frozen=True)
class SpeechText:
    """Tokens around a transcript (Radford et al. 2022, figure 1)."""

    features: FeatureSpec
    start: int
    previous: int | None
    """Token in front of what was said before."""
    no_speech: int | None
    """Token whose probability in front of all is that of no speech."""
    no_times: int
    first_time: int
    """Token of the time 0; each further one is a step later."""
    end: int
    languages: Mapping[str, int]
    """Tokens of languages by code; empty of a model of English alone."""
    tasks: Mapping[SpeechTask, int]
    suppressed: tuple[int, ...]
    begin_suppressed: tuple[int, ...]
    initial_times: int
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """Layers of the decoder and heads of them that look at what is said; empty where files name none."""

    @property
    def step_s(self) -> float:
        """Seconds between the times of two tokens: two frames."""
        return 2 * self.features.hop / self.features.rate

    def rules(self, *, has_times: bool) -> SpeechRules:
        if not has_times:
            return SpeechRules(self.suppressed, self.begin_suppressed, self.no_times, self.end)
        return SpeechRules(
            (*self.suppressed, self.no_times),
            self.begin_suppressed,
            None,
            self.end,
            self.first_time,
            self.first_time + self.initial_times,
        )

    def prompt(self, task: SpeechTask, language: str | None, *, has_times: bool) -> list[int]:
        """Tokens in front of a transcript; `language` is one of `languages`.
        Raises InvalidRequestError: the model knows no such language, or does not translate."""
        tokens = [self.start]
        if self.languages:
            if language is None or language not in self.languages:
                refuse("language", f"must be one of {', '.join(sorted(self.languages))}")
            tokens += [self.languages[language], self.tasks[task]]
        elif task == "translate" or language not in (None, "en"):
            refuse("model", "transcribes English alone")
        return tokens if has_times else [*tokens, self.no_times]


def read_speech(
    directory: Path, tokenizer: Tokenizer, generation: Mapping[str, Any]
) -> SpeechText | None:
    """Tokens and features of the model in a directory, whose generation_config.json is given.

    None of a model that hears nothing, or whose config.json cannot be read, of which the worker says why.
    Raises ConfigError: a token is missing, or a file says what Pagoda does not do."""
    try:
        spec = read_model_config(directory)
    except ConfigError:
        return None
    if spec.audio is None:
        return None
    path = directory / "preprocessor_config.json"
    fields = Fields(read_object(path) if path.is_file() else {}, str(path))
    fields.require("dither", 0.0)
    features = FeatureSpec(
        fields.positive("feature_size", spec.audio.mel_bins),
        spec.audio.frames,
        fields.positive("sampling_rate", 16_000, most=192_000),
        fields.positive("n_fft", 400, most=2**16),
        fields.positive("hop_length", 160, most=2**16),
    )
    if features.mel_bins != spec.audio.mel_bins:
        fields.refuse("feature_size", f"must be the {spec.audio.mel_bins} of num_mel_bins")
    silent = read_object(directory / "config.json")

    def listed(name: str) -> tuple[int, ...]:
        value = whole_numbers(generation.get(name, silent.get(name)))
        ids = value if isinstance(value, list) else []
        return tuple(it for it in ids if isinstance(it, int) and 0 <= it < spec.vocab_size)

    def token(text: str) -> int:
        found = tokenizer.token_id(text)
        if found is None:
            raise ConfigError(f"{directory}: the tokenizer lacks the token {text}.")
        return found

    is_multilingual = generation.get("is_multilingual", True) is not False
    found = tokenizer.added_tokens().items() if is_multilingual else ()
    no_times = token("<|notimestamps|>")
    steps = whole_numbers(generation.get("max_initial_timestamp_index", _INITIAL_TIMES))
    return SpeechText(
        features,
        start=token("<|startoftranscript|>"),
        previous=tokenizer.token_id("<|startofprev|>"),
        no_speech=next((it for it in map(tokenizer.token_id, _NO_SPEECH) if it is not None), None),
        no_times=no_times,
        first_time=no_times + 1,
        end=token("<|endoftext|>"),
        languages={m[1]: i for i, (text, _) in found if (m := _LANGUAGE.fullmatch(text))},
        tasks={"transcribe": token("<|transcribe|>"), "translate": token("<|translate|>")}
        if is_multilingual
        else {},
        suppressed=listed("suppress_tokens"),
        begin_suppressed=listed("begin_suppress_tokens"),
        initial_times=steps if isinstance(steps, int) else _INITIAL_TIMES,
        alignment_heads=_heads(generation.get("alignment_heads"), spec, directory),
    )


def _heads(value: object, spec: ModelSpec, directory: Path) -> tuple[tuple[int, int], ...]:
    """Pairs of a layer of the decoder and a head of it. Raises ConfigError: a value is no list of them."""
    sizes = spec.num_layers // 2, spec.num_heads  # each layer of the file is two
    try:
        heads = msgspec.convert(whole_numbers(value or []), tuple[tuple[int, int], ...])
    except msgspec.ValidationError:
        heads = ((-1, -1),)
    if all(0 <= layer < sizes[0] and 0 <= head < sizes[1] for layer, head in heads):
        return heads
    raise ConfigError(
        f"{directory / 'generation_config.json'}: alignment_heads must be pairs of a layer below {sizes[0]} and "
        f"a head below {sizes[1]}."
    )
