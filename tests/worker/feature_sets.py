# SPDX-License-Identifier: Apache-2.0
"""Engines and requests that have the features of a set (`tools.features`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from adapter_files import save_adapter
from feature_models import FLAGS, save_featured
from in_process import InProcessEngine, engine
from test_drafts import EOS, PROMPT, sampling_of
from test_masked_answers import GRAMMARS, TEXTS

from pagoda.checkpoints.adapters import adapter_digest
from pagoda.messages.adapters import Adapter
from pagoda.messages.frontend import (
    GenerateRequest,
    Grammar,
    Pooling,
    PromptLogprobs,
    TokenLogprobs,
    Work,
)
from pagoda.messages.speculation import OFF, SpeculativeConfig
from pagoda.text.answer_formats import ParserChoice
from pagoda.text.grammars.tool_grammars import CallableTool, CallRules, answer_grammar

Answers = dict[str, tuple[list[int], list[TokenLogprobs | PromptLogprobs], bytes]]
"""Tokens of each request, what is reported of them and of the prompt, and the vector, if one was asked for."""
LENGTH = 24
WEATHER = CallableTool(
    "weather",
    {
        "type": "object",
        "properties": {"at": {"enum": ["Bern", "Bergen"]}, "days": {"type": "boolean"}},
        "required": ["at", "days"],
    },
    is_strict=True,
)


@dataclass(frozen=True)
class Featured:
    """A model with its files, and how it is served: `numbers` are the options that its bits depend on."""

    model: Path
    backend: str
    speculation: SpeculativeConfig
    numbers: dict[str, Any]
    features: Collection[str]

    def plain(self) -> InProcessEngine:
        """An engine that does nothing but compute, for one request at a time."""
        return engine(self.model, self.backend, token_texts=TEXTS, **self.numbers)

    def featured(self) -> InProcessEngine:
        features = self.features
        return engine(
            self.model,
            self.backend,
            pp=2 if "pipeline parallelism" in features else 1,
            token_texts=TEXTS,
            speculation=self.speculation,
            enable_prefix_caching="prefix cache" in features,
            max_num_batched_tokens=2048 if "encoders" in features else 23,
            **self.numbers,
        )


def featured(features: Collection[str], directory: Path, number: int = 0) -> Featured:
    """Writes the files of a model that has the features; `number` is that of the set."""
    model = save_featured(features, directory / "model", number)
    path = directory / "model" / ("model.gguf" if "GGUF files" in features else "")
    numbers: dict[str, Any] = {
        "block_size": 64 if "states" in features else 16,  # with room for a state
        "tp": 2 if {"tensor parallelism", "expert parallelism"} & set(features) else 1,
        "experts": "expert parallelism" in features,
        "kv_cache_dtype": "int8" if "int8 KV" in features else "auto",
        "quantization": next((it for it in FLAGS if it in features), "none"),
    }
    if "adapters" in features:
        target = "query" if "encoders" in features else "o_proj"
        adapter = save_adapter(model, directory / "adapter", targets=(target,), seed=number)
        numbers["adapters"] = (Adapter("one", str(adapter), adapter_digest(adapter)),)
    speculation = OFF
    if "draft model" in features:
        save_featured((), directory / "draft")
        speculation = SpeculativeConfig(method="draft_model", model=str(directory / "draft"))
    for method in ("suffix", "ngram"):
        if method in features:
            speculation = SpeculativeConfig(method=method)  # type: ignore[arg-type]
    backend = next((it for it in ("reference", "cuda") if it in features), "cpu")
    return Featured(path, backend, speculation, numbers, features)


def asked(of: Featured) -> list[GenerateRequest]:
    """Requests that use the features: with all kinds of sampling, some of them in grammars, calls or adapters."""
    features = of.features
    reports = {"logprobs": 2, "prompt_logprobs": 1} if "log-probabilities" in features else {}
    kinds = ("greedy", "sampled", "penalised", "held back", "greedy", "sampled")
    grammars: list[Grammar | None] = [None] * len(kinds)
    if "grammars" in features:
        grammars[3:5] = GRAMMARS[:2]
    if "tools" in features:
        grammars[5] = forced_call()
    adapters = ["", *(adapter.digest for adapter in of.numbers.get("adapters", ()))]
    is_encoder = "encoders" in features

    def request(place: int, choice: int) -> GenerateRequest:
        sampling = msgspec.structs.replace(
            sampling_of(kinds[place]), max_tokens=LENGTH, logprobs=None, seed=3 + choice
        )
        if place % 2:
            sampling = msgspec.structs.replace(sampling, **reports)
        if is_encoder:
            sampling = msgspec.structs.replace(sampling, max_tokens=0, min_tokens=0)
        return GenerateRequest(
            request_id=f"{place} {choice}",
            prompt_token_ids=PROMPT * 5 + [place],
            work=Work(
                sampling,
                eos_token_ids=(*EOS, *TEXTS.eos_token_ids),
                pooling=Pooling.MEAN if is_encoder else None,
                adapter=adapters[place % len(adapters)],
            ),
            grammar=grammars[place],
        )

    choices = 2 if "n > 1" in features else 1
    return [request(place, choice) for place in range(len(kinds)) for choice in range(choices)]


def forced_call() -> Grammar:
    """The grammar of an answer that has to call a tool."""
    return answer_grammar(
        lambda _: None,
        ParserChoice("hermes", "none").formats(""),
        calls=CallRules([WEATHER], must_call=True, is_single=True),
        tool_format="hermes",
        reasoning=None,
    )


def answers(model: InProcessEngine, requests: Sequence[GenerateRequest]) -> Answers:
    found: Answers = {request.request_id: ([], [], b"") for request in requests}
    for chunk in model.chunks(requests):
        tokens, logprobs, vector = found[chunk.request_id]
        found[chunk.request_id] = (
            tokens + chunk.token_ids,
            [*logprobs, *filter(None, [chunk.prompt_logprobs]), *(chunk.logprobs or [])],
            vector + (chunk.embedding or b""),
        )
    return found
