# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and vectors of prompts are those of transformers, however prompts are computed."""

from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from in_process import InProcessEngine, engine
from tiny_models import FAMILIES, make_model

from pagoda.messages.frontend import GenerateRequest, Pooling, TokenChunk, TokenLogprobs, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.text.pooling_files import read_pooling

PROMPTS = [
    [random.Random(length).randrange(320) for _ in range(length)] for length in (1, 2, 17, 70, 70)
]
NUM_TOP = 5
TOLERANCE = 1e-4

Model = tuple[Path, transformers.PreTrainedModel]
Open = Callable[..., InProcessEngine]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp(request.param)
    made = make_model(request.param)
    made.save_pretrained(directory)
    return directory, made


def _requests(
    num_top: int = NUM_TOP, max_tokens: int = 4, pooling: Pooling | None = None
) -> list[GenerateRequest]:
    sampling = SamplingParams(
        temperature=0,
        seed=0,
        max_tokens=max_tokens,
        prompt_logprobs=None if pooling else num_top,
        logprobs=NUM_TOP,
    )
    return [
        GenerateRequest(
            request_id=str(i), prompt_token_ids=prompt, work=Work(sampling, pooling=pooling)
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def _scores(
    engine: InProcessEngine, requests: Sequence[GenerateRequest]
) -> dict[str, tuple[list[TokenLogprobs], list[int]]]:
    """Entries of the prompt's tokens but the first, each once and in order; and the answer."""
    found: dict[str, tuple[list[TokenLogprobs], list[int]]] = {
        request.request_id: ([], []) for request in requests
    }
    for chunk in engine.chunks(requests):
        entries, answer = found[chunk.request_id]
        if chunk.prompt_logprobs is not None:
            assert chunk.prompt_logprobs.first == 1 + len(entries)
            entries += chunk.prompt_logprobs.entries()
        answer += chunk.token_ids
    return found


def _check(
    model: transformers.PreTrainedModel, prompt: list[int], got: list[TokenLogprobs]
) -> None:
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    assert len(got) == len(prompt) - 1
    for position, entry in enumerate(got):
        row, token_id = expected[position], prompt[position + 1]
        assert math.isclose(entry.logprob, row[token_id], abs_tol=TOLERANCE)
        assert len(entry.top_token_ids) == len(entry.top_logprobs)
        top = row.topk(max(1, len(entry.top_logprobs))).values[: len(entry.top_logprobs)]
        torch.testing.assert_close(
            torch.tensor(entry.top_logprobs).double(), top, atol=TOLERANCE, rtol=0
        )
        above = int((row > row[token_id] + TOLERANCE).sum())
        assert above < entry.rank <= int((row > row[token_id] - TOLERANCE).sum())


def _answers(model: Model, requests: Sequence[GenerateRequest], backend: str) -> list[list[int]]:
    plain = [
        msgspec.structs.replace(
            request,
            work=msgspec.structs.replace(
                request.work,
                sampling=msgspec.structs.replace(request.work.sampling, prompt_logprobs=None),
            ),
        )
        for request in requests
    ]
    return engine(model[0], backend).answer(plain)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "block_size": 4},
        {"enable_prefix_caching": True},
    ],
    ids=["whole", "chunked", "cached"],
)
def test_prompts_are_scored(model: Model, backend: str, options: dict[str, int]) -> None:
    started = engine(model[0], backend, **options)
    requests = _requests()
    expected = _answers(model, requests, backend)
    for _ in range(2):  # the second time everything is in the cache
        found = _scores(started, requests)
        for prompt, (entries, answer), plain in zip(PROMPTS, found.values(), expected, strict=True):
            _check(model[1], prompt, entries)
            assert answer == plain


@pytest.fixture
def small(tmp_path: Path) -> Model:
    made = make_model("qwen3")
    made.save_pretrained(tmp_path)
    return tmp_path, made


@pytest.mark.parametrize("caching", [False, True])
def test_a_preempted_prompt_goes_on_where_it_was(small: Model, backend: str, caching: bool) -> None:
    options = {"max_num_batched_tokens": 7, "block_size": 4, "num_blocks": 25}
    started = engine(small[0], backend, enable_prefix_caching=caching, **options)
    preempted, urgent = _requests()[3:]
    urgent = msgspec.structs.replace(urgent, priority=-1)
    entries: list[TokenLogprobs] = []
    num_chunks = 0

    def collect(requests: Sequence[GenerateRequest]) -> None:
        nonlocal num_chunks
        for chunk in started.chunks(requests):
            if chunk.request_id == preempted.request_id and chunk.prompt_logprobs:
                assert chunk.prompt_logprobs.first == 1 + len(entries)
                entries.extend(chunk.prompt_logprobs.entries())
                num_chunks += 1
                if num_chunks == 4:
                    collect([urgent])

    collect([preempted])
    _check(small[1], preempted.prompt_token_ids, entries)
    assert started.load().num_preemptions == 1
    # What was computed is taken from the cache, but for the last token that is scored already.
    assert len(entries) == 69


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_and_stages(small: Model, backend: str, tp: int, pp: int) -> None:
    started = engine(small[0], backend, tp, pp, max_num_batched_tokens=48)
    for prompt, (entries, _) in zip(PROMPTS, _scores(started, _requests()).values(), strict=True):
        _check(small[1], prompt, entries)


def test_a_request_that_only_scores_has_no_answer(small: Model, backend: str) -> None:
    started = engine(small[0], backend, enable_prefix_caching=True)
    for num_top in (0, 320):
        for prompt, (entries, answer) in zip(
            PROMPTS, _scores(started, _requests(num_top, max_tokens=0)).values(), strict=True
        ):
            _check(small[1], prompt, entries)
            assert answer == []


def test_positions_that_the_sender_has_are_not_scored_again(small: Model, backend: str) -> None:
    started = engine(small[0], backend, enable_prefix_caching=True, block_size=4)
    (request,) = _requests()[3:4]
    whole = [chunk.prompt_logprobs for chunk in started.chunks([request]) if chunk.prompt_logprobs]
    (complete,) = whole
    for known in (1, 2, 41, 69):
        later = msgspec.structs.replace(request, num_scored_tokens=known)
        chunks = list(started.chunks([later]))
        (rest,) = [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs]
        assert rest == complete.since(known)
        assert chunks[-1].num_cached_tokens == (known - 1) // 4 * 4
    done = msgspec.structs.replace(request, num_scored_tokens=70)
    assert all(chunk.prompt_logprobs is None for chunk in started.chunks([done]))


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 7, "block_size": 4}, {"tp": 2, "pp": 2}],
    ids=["whole", "chunked", "ranks"],
)
def test_pooled_prompts(
    small: Model, backend: str, pooling: Pooling, options: dict[str, int]
) -> None:
    start = partial(engine, small[0], backend, enable_prefix_caching=True)
    started, requests = start(**options), _requests(max_tokens=0, pooling=pooling)
    for _ in range(2):
        found = {
            chunk.request_id: chunk.embedding
            for chunk in started.chunks(requests)
            if chunk.embedding is not None
        }
        for request in requests:
            vector = array("f", found[request.request_id])
            with torch.no_grad():
                ids = torch.tensor([request.prompt_token_ids])
                states = small[1].model(ids).last_hidden_state[0]
            expected = states[-1] if pooling is Pooling.LAST else states.mean(0)
            torch.testing.assert_close(torch.tensor(vector), expected, atol=1e-4, rtol=1e-4)
    has_hits = started.load().num_prefix_hit_tokens > 0
    assert has_hits is (pooling is Pooling.LAST)


def _check_last_state(
    decoder: transformers.PreTrainedModel, request: GenerateRequest, chunk: TokenChunk
) -> None:
    """The chunk has the hidden state of the prompt's last token, as transformers computes it."""
    with torch.no_grad():
        states = decoder(torch.tensor([request.prompt_token_ids])).last_hidden_state[0]
    assert chunk.embedding is not None
    vector = torch.tensor(array("f", chunk.embedding))
    torch.testing.assert_close(vector, states[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sizes", [{}, {"max_shard_size": "60KB"}], ids=["one file", "shards"])
def test_files_of_an_embedding_model_may_lack_an_untied_head(
    sizes: dict[str, str], tmp_path: Path
) -> None:
    """As Qwen3-Embedding-8B is published."""
    decoder = make_model("qwen3-yarn").model
    decoder.save_pretrained(tmp_path, **sizes)
    said = json.loads((tmp_path / "config.json").read_text())
    said |= {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(said))
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert not read_pooling(tmp_path).generates
    request = _requests(max_tokens=0, pooling=Pooling.LAST)[3]
    *_, chunk = engine(tmp_path, "auto", pp=2).chunks([request])
    _check_last_state(decoder, request, chunk)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("sizes", [{}, {"max_shard_size": "60KB"}], ids=["one file", "shards"])
def test_a_decoder_without_a_head_is_pooled(
    family: str, sizes: dict[str, str], tmp_path: Path
) -> None:
    decoder = make_model(family).model
    decoder.save_pretrained(tmp_path, **sizes)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["architectures"][0].endswith("Model")
    request = _requests(max_tokens=0, pooling=Pooling.LAST)[3]
    *_, chunk = engine(tmp_path, "reference").chunks([request])
    _check_last_state(decoder, request, chunk)
