# SPDX-License-Identifier: Apache-2.0
"""The shape of llama.cpp's completions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pagoda.api.answers.generation import Generation
from pagoda.api.http.sse import event
from pagoda.api.http.timing import AnswerTimes, progress_of, times_of, timings
from pagoda.api.openai.logprobs import TokenSpelling, chat_entries, encoded_entry
from pagoda.messages.frontend import FinishReason
from pagoda.messages.sampling_params import DRAWS, SamplingParams
from pagoda.plugins.llamacpp.bodies import SamplingFields
from pagoda.text.text_generator import TextDelta, joined_deltas


@dataclass(frozen=True)
class PreparedCompletion:
    """A body, and what the server made of it."""

    body: SamplingFields
    model: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def generation_settings(sampling: SamplingParams, asked: PreparedCompletion) -> dict[str, Any]:
    """The sampling of a request in llama.cpp's words; samplers that Pagoda has not are off."""
    body = asked.body
    banned = asked.eos_token_ids if sampling.ignore_eos else ()
    bias = [{"token": token, "bias": value} for token, value in (sampling.logit_bias or {}).items()]
    settings = {
        "n_predict": sampling.max_tokens,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "typical_p": sampling.typical_p,
        "repeat_last_n": -1,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "dry_sequence_breakers": [],
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "stop": list(sampling.stop),
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": sampling.ignore_eos,
        "stream": bool(body.stream),
        "logit_bias": bias + [{"token": token, "bias": None} for token in banned],
        "n_probs": sampling.logprobs or 0,
        "min_keep": 0,
        "grammar": body.grammar or "",
        "samplers": ["penalties", "top_k", "typ_p", "top_p", "min_p", "temperature"],
        "timings_per_token": bool(body.timings_per_token),
        "post_sampling_probs": False,
        "lora": [],
    }
    return settings | {name: getattr(sampling, name) for name in DRAWS}


class LlamaAnswer:
    """One completion."""

    is_complete = False

    def __init__(
        self, generation: Generation, index: int, asked: PreparedCompletion, prompt: str
    ) -> None:
        """`prompt` is the text of the prompt."""
        self._generation = generation
        self._index = index
        self._asked = asked
        self._prompt = prompt
        self._deltas: list[TextDelta] = []
        self._has_begun = False
        self._num_tokens = 0
        self._has_new_line = False
        self._times = AnswerTimes()

    def _count(self, delta: TextDelta) -> None:
        self._num_tokens += len(delta.token_ids)
        self._has_new_line |= "\n" in delta.text
        asked = self._asked.body
        if delta.finish_reason is not None or asked.timings_per_token or asked.return_progress:
            self._times = times_of(self._generation, self._index)

    def _probabilities(self, delta: TextDelta) -> dict[str, Any]:
        if not self._asked.body.n_probs or not delta.logprobs:
            return {}
        spelling = TokenSpelling(self._generation.generator.text.tokenizer)
        entries = chat_entries(spelling, delta.token_ids, delta.logprobs)
        told = []
        for token_id, entry, known in zip(delta.token_ids, entries, delta.logprobs, strict=True):
            entry["id"] = token_id
            for top_id, top in zip(known.top_token_ids, entry["top_logprobs"], strict=True):
                top["id"] = top_id
            told.append(encoded_entry(entry))
        return {"completion_probabilities": told}

    @property
    def _num_prompt_tokens(self) -> int:
        return len(self._generation.requests[self._index].prompt_token_ids)

    def _fields(self, text: str, token_ids: list[int], *, is_last: bool) -> dict[str, Any]:
        return {
            "index": self._index,
            "content": text,
            "tokens": token_ids,
            "stop": is_last,
            "id_slot": -1,
            "tokens_predicted": self._num_tokens,
            "tokens_evaluated": self._num_prompt_tokens,
        }

    def _ending(self, delta: TextDelta) -> dict[str, Any]:
        """The last fields of an answer: settings, the reason to end, and figures."""
        request, asked = self._generation.requests[self._index], self._asked
        num_tokens = self._num_prompt_tokens + self._num_tokens
        is_word = isinstance(delta.stop_reason, str)
        is_short = delta.finish_reason is FinishReason.LENGTH
        has_stopped = delta.finish_reason is FinishReason.STOP
        return {
            "model": asked.model,
            "generation_settings": generation_settings(
                _told(request.request.work.sampling, request.sampling), asked
            ),
            "prompt": self._prompt,
            "has_new_line": self._has_new_line,
            "truncated": is_short and num_tokens >= asked.max_model_len,
            "stop_type": "word"
            if is_word
            else "limit"
            if is_short
            else "eos"
            if has_stopped
            else "none",
            "stopping_word": delta.stop_reason if is_word else "",
            "tokens_cached": num_tokens - 1,
            "timings": timings(self._times),
        }

    def add(self, delta: TextDelta) -> None:
        self._count(delta)
        self._deltas.append(delta)

    def whole(self) -> dict[str, Any]:
        """The response in one piece."""
        delta = joined_deltas(self._deltas)
        token_ids = delta.token_ids if self._asked.body.return_tokens else []
        fields = self._fields(delta.text, token_ids, is_last=True)
        return self._chosen({**fields, **self._ending(delta), **self._probabilities(delta)})

    def _chosen(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields that `response_fields` names, by their paths; all without it."""
        paths = self._asked.body.response_fields
        if not paths:
            return fields
        found: dict[str, Any] = {}
        for path in paths:
            value: Any = fields
            for name in path.split("/"):
                value = value.get(name, math.nan) if isinstance(value, dict) else math.nan
            if value is not math.nan:
                found[path] = value
        return found

    def events(self, delta: TextDelta) -> bytes:
        self._count(delta)
        asked = self._asked.body
        written = b""
        if asked.return_progress and not self._has_begun:
            written = self._progress()
        self._has_begun = True
        is_last = delta.finish_reason is not None
        if delta.text or delta.token_ids:
            fields = {
                **self._fields(delta.text, delta.token_ids, is_last=False),
                **self._probabilities(delta),
            }
            if asked.timings_per_token:
                fields["timings"] = timings(self._times)
            written += event(fields)
        if is_last:
            fields = self._fields("", [], is_last=True)
            written += event(self._chosen({**fields, **self._ending(delta)}))
        return written

    def _progress(self) -> bytes:
        """Events about the prompt: one for its beginning and one for its end, when the first token is there."""
        written = b""
        for fields in progress_of(self._times):
            if not self._asked.body.timings_per_token:
                del fields["timings"]
            written += event(
                {**self._fields("", [], is_last=False), "tokens_predicted": 0, **fields}
            )
        return written


def _told(resolved: SamplingParams, given: SamplingParams) -> SamplingParams:
    """The sampling of the engine's request with the stop strings, which the frontend serves."""
    fields = {name: getattr(resolved, name) for name in SamplingParams.__struct_fields__}
    return SamplingParams(**{**fields, "stop": given.stop})
