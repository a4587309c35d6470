# SPDX-License-Identifier: Apache-2.0
"""Engines and requests that have the features of a set (`tools.features`)."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from adapter_files import save_adapter
from feature_models import ENDS, FLAGS, TOKENIZER, save_featured
from head_models import save_eagle_head
from in_process import InProcessEngine, engine
from test_drafts import PROMPT, sampling_of
from test_masked_answers import GRAMMARS

from pagoda.checkpoints.adapters import adapter_digest
from pagoda.engine.structured_output.vocabulary import TokenTexts
from pagoda.errors import PagodaError
from pagoda.fleet.endpoint import Endpoint
from pagoda.llm.engine_options import EngineOptions
from pagoda.messages.adapters import Adapter
from pagoda.messages.frontend import (
    GenerateRequest,
    Grammar,
    Pooling,
    TokenChunk,
    TokenLogprobs,
    Work,
)
from pagoda.messages.speculation import OFF, SpeculativeConfig
from pagoda.text.answer_formats import ParserChoice
from pagoda.text.grammars.tool_grammars import CallableTool, CallRules, answer_grammar


@dataclass
class Answer:
    """All that is said to a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: tuple[bytes, bytes, bytes] = (b"", b"", b"")
    """The columns of `PromptLogprobs`."""
    vector: bytes = b""

    def add(self, chunk: TokenChunk) -> None:
        assert chunk.error is None, chunk.error
        self.tokens += chunk.token_ids
        self.logprobs += chunk.logprobs or []
        if (found := chunk.prompt_logprobs) is not None:
            ranks, top, values = self.prompt
            columns = ranks + found.ranks, top + found.top_token_ids, values + found.logprobs
            self.prompt = columns
        self.vector += chunk.embedding or b""


Answers = dict[str, Answer]
LENGTH = 16
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

    @cached_property
    def texts(self) -> TokenTexts | None:
        """The texts of the model's tokens, where there are grammars."""
        if not {"grammars", "tools"} & set(self.features):
            return None
        return TokenTexts(TOKENIZER.read_text(encoding="utf-8"), tuple(ENDS))

    def plain(self) -> InProcessEngine:
        """An engine that does nothing but compute, for one request at a time."""
        return engine(self.model, self.backend, token_texts=self.texts, **self.numbers)

    def featured(self) -> InProcessEngine:
        features = self.features
        return engine(
            self.model,
            self.backend,
            pp=2 if "pipeline parallelism" in features else 1,
            cp=2 if "context parallelism" in features else 1,
            token_texts=self.texts,
            speculation=self.speculation,
            enable_prefix_caching="prefix cache" in features,
            max_num_batched_tokens=2048 if "encoders" in features else 23,
            **self.numbers,
        )


def featured(features: Collection[str], directory: Path, number: int = 0) -> Featured:
    """Writes the files of a model that has the features; `number` is that of the set."""
    model = save_featured(features, directory / "model", number)
    path = directory / "model" / ("model.gguf" if "GGUF files" in features else "")
    sizes = {"states": 64, "pypto": 128}
    numbers: dict[str, Any] = {
        "dtype": "float32",
        "block_size": next((sizes[it] for it in sizes if it in features), 16),
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
    if "EAGLE-3" in features:
        if "encoders" not in features:
            last = model.config.num_hidden_layers - 1
            save_eagle_head("eagle3-speculators", directory / "head", model, (0, last // 2, last))
        speculation = SpeculativeConfig(method="eagle3", model=str(directory / "head"))
    if "MTP" in features:
        speculation = SpeculativeConfig(method="mtp")
    if "suffix" in features:
        speculation = SpeculativeConfig(method="suffix")
    if "ngram" in features:
        speculation = SpeculativeConfig(method="ngram", prompt_lookup_min=1, prompt_lookup_max=4)
    backend = next((it for it in ("cpu", "reference", "cuda", "pypto") if it in features), "cpu")
    return Featured(path, backend, speculation, numbers, features)


def asked(of: Featured) -> list[GenerateRequest]:
    """Requests that use the features: with all kinds of sampling, some of them in grammars, calls or adapters."""
    features = of.features
    reports = {"logprobs": 2, "prompt_logprobs": 1} if "log-probabilities" in features else {}
    kinds = ("greedy", "sampled", "penalised", "held back", "greedy", "sampled")
    grammars: list[Grammar | None] = [None] * len(kinds)
    if "grammars" in features:
        grammars[4:] = GRAMMARS[:2]
    if "tools" in features:
        grammars[2] = forced_call()
    adapters = ["", *(adapter.digest for adapter in of.numbers.get("adapters", ()))]
    is_encoder = "encoders" in features

    def request(place: int, choice: int) -> GenerateRequest:
        sampling = msgspec.structs.replace(
            sampling_of(kinds[place]), max_tokens=LENGTH, logprobs=None, seed=3 + choice
        )
        if place < 2:  # a text that repeats itself, as drafters want it
            sampling = msgspec.structs.replace(sampling, allowed_token_ids=tuple(sorted({*PROMPT})))
        if place % 2:
            sampling = msgspec.structs.replace(sampling, **reports)
        if is_encoder:
            sampling = msgspec.structs.replace(sampling, max_tokens=0, min_tokens=0)
        return GenerateRequest(
            request_id=f"{place} {choice}",
            prompt_token_ids=[place, *PROMPT * 8],
            work=Work(
                sampling,
                eos_token_ids=tuple(ENDS),
                pooling=Pooling.MEAN if is_encoder else None,
                adapter=adapters[place % len(adapters)],
            ),
            grammar=grammars[place],
        )

    found = [request(place, 0) for place in range(len(kinds))]
    if "n > 1" in features:  # which are requests of other seeds
        found += [request(place, 1) for place, kind in enumerate(kinds) if kind == "sampled"]
    return found


def forced_call() -> Grammar:
    """The grammar of an answer that has to call a tool."""
    return answer_grammar(
        lambda _: None,
        ParserChoice("llama3_json", "none").formats(""),
        calls=CallRules([WEATHER], must_call=True, is_single=True),
        tool_format="llama3_json",
        reasoning=None,
    )


def answers(model: InProcessEngine, requests: Sequence[GenerateRequest]) -> Answers:
    found = {request.request_id: Answer() for request in requests}
    for chunk in model.chunks(requests):
        found[chunk.request_id].add(chunk)
    return found


async def ask(endpoint: Endpoint, request: GenerateRequest) -> Answer:
    found = Answer()
    async with aclosing(endpoint.generate(request)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            found.add(chunk)
    return found


def refusal_of(features: Collection[str], directory: Path) -> str:
    """The sentence that refuses the features, as flags or when requests use them; empty if none does."""
    of = featured(features, directory)
    is_speculating = of.speculation.method != "off"
    config = json.dumps(msgspec.to_builtins(of.speculation)) if is_speculating else None
    try:
        EngineOptions(speculative_config=config, lora=()).engine_config(str(of.model))
        engine = of.featured()
        requests = asked(replace(of, features=[it for it in features if it != "encoders"]))
        answers(engine, requests)
    except (PagodaError, RuntimeError) as error:
        return str(error)
    return ""
