# SPDX-License-Identifier: Apache-2.0
"""Adapters answer as models do that they are merged into, however they are batched, cut, split and cached."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from adapter_files import ALL, ATTENTION, merged, save_adapter
from driver import GREEDY
from family_models import FAMILIES
from family_models import make_model as make_other_model
from gguf import GGMLQuantizationType as Kind
from gguf_models import save_gguf
from in_process import InProcessEngine, engine
from own_code_models import OWN_CODE, as_makers_publish, make_like
from tiny_models import continuation, make_model

from pagoda.checkpoints.adapters import adapter_digest
from pagoda.errors import ConfigError
from pagoda.messages.adapters import Adapter
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan, StepResult
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker import loading
from pagoda.worker.loading import load_runner, plan_worker
from pagoda.worker.memory_plan import WorkerMemoryPlan
from pagoda.worker.runner import Runner

LENGTH = 20
LATENT = ("kv_a_proj_with_mqa", "o_proj")
"""Maps of latent attention that may be adapted."""


def _adapter(directory: Path) -> Adapter:
    return Adapter(directory.name, str(directory), adapter_digest(directory))


@dataclass(frozen=True)
class Adapted:
    """A model with adapters, and what transformers answers with each of them merged."""

    directory: Path
    adapters: tuple[Adapter, ...]
    requests: list[GenerateRequest]
    expected: list[list[int]]


def _adapted(directory: Path, family: str, targets: tuple[str, ...] = ALL, **sizes: Any) -> Adapted:
    if family in OWN_CODE:
        model = make_like(family)
        model.save_pretrained(directory / "model")
        as_makers_publish(family, directory / "model")
    else:
        make = make_other_model if family in FAMILIES else make_model
        model = make(family, num_hidden_layers=3, **sizes)
        model.save_pretrained(directory / "model")
    some = ("q_proj", "v_proj") if "v_proj" in targets else targets[:1]
    adapters = [
        save_adapter(model, directory / "one", rank=8, seed=1, targets=targets),
        save_adapter(model, directory / "two", rank=20, seed=2, targets=some),
        save_adapter(
            model,
            directory / "three",
            rank=3,
            seed=3,
            targets=targets,
            lora_alpha=7,
            use_rslora=True,
        ),
    ]
    known = tuple(map(_adapter, adapters))
    models = {"": model} | {adapter.digest: merged(model, Path(adapter.path)) for adapter in known}
    rng = random.Random(5)
    prompts = [[rng.randrange(320) for _ in range(rng.randint(1, 60))] for _ in range(2)]
    requests, expected = [], []
    for digest, own in models.items():
        for prompt in prompts:
            requests.append(
                GenerateRequest(
                    request_id=str(len(requests)),
                    prompt_token_ids=prompt,
                    work=Work(msgspec.structs.replace(GREEDY, max_tokens=LENGTH), adapter=digest),
                )
            )
            expected.append(continuation(own, prompt, LENGTH))
    assert len({*map(tuple, expected)}) == len(expected)
    return Adapted(directory / "model", known, requests, expected)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return _adapted(tmp_path_factory.mktemp("adapted"), "qwen3")


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_several_adapters_in_one_batch(adapted: Adapted, backend: str, tp: int, pp: int) -> None:
    split = engine(
        adapted.directory,
        backend,
        tp,
        pp,
        adapters=adapted.adapters,
        max_num_batched_tokens=37,
    )
    assert split.answer(adapted.requests) == adapted.expected


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "cohere"])
def test_families(family: str, backend: str, tmp_path: Path) -> None:
    own = _adapted(tmp_path, family)
    model = engine(own.directory, backend, adapters=own.adapters)
    assert model.answer(own.requests) == own.expected


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_attention_of_models_with_experts(family: str, backend: str, tmp_path: Path) -> None:
    own = _adapted(tmp_path, family, ATTENTION)
    for tp in (1, 2):
        model = engine(own.directory, backend, tp, adapters=own.adapters)
        assert model.answer(own.requests) == own.expected


@pytest.mark.parametrize(
    ("family", "targets"), [("deci", ("q_proj", "o_proj")), ("solar", ALL), ("arctic", ATTENTION)]
)
def test_families_with_code_of_their_own(
    family: str, targets: tuple[str, ...], backend: str, tmp_path: Path
) -> None:
    """Layers of DeciLM may have fewer heads of keys, or no attention."""
    own = _adapted(tmp_path, family, targets)
    for tp in (1, 2):
        model = engine(own.directory, backend, tp, adapters=own.adapters)
        assert model.answer(own.requests) == own.expected


def test_latent_attention(backend: str, tmp_path: Path) -> None:
    """Rows of keys that are rotated lie in another order than in adapters."""
    own = _adapted(tmp_path, "deepseek-v3", LATENT)
    for tp in (1, 2):
        model = engine(own.directory, backend, tp, adapters=own.adapters)
        assert model.answer(own.requests) == own.expected


def test_gguf_files(backend: str, tmp_path: Path) -> None:
    """Rows of queries and keys are permuted in such files, but not in adapters."""
    own = _adapted(tmp_path, "llama", num_key_value_heads=2, attention_bias=False, mlp_bias=False)
    model = make_model(
        "llama", num_hidden_layers=3, num_key_value_heads=2, attention_bias=False, mlp_bias=False
    )
    save_gguf(model, tmp_path / "model.gguf", lambda _: Kind.F32)
    file = engine(tmp_path / "model.gguf", backend, adapters=own.adapters, dtype="float32")
    assert file.answer(own.requests) == own.expected


def test_prefixes_are_shared_within_an_adapter_alone(adapted: Adapted, backend: str) -> None:
    model = engine(
        adapted.directory, backend, adapters=adapted.adapters, enable_prefix_caching=True
    )
    prompt = list(range(100, 150))
    own = [*dict.fromkeys(request.work.adapter for request in adapted.requests)]
    requests = [
        GenerateRequest(
            request_id=str(place),
            prompt_token_ids=prompt,
            work=Work(msgspec.structs.replace(GREEDY, max_tokens=4), adapter=digest),
        )
        for place, digest in enumerate(own)
    ]
    first = [model.answer([request]) for request in requests]
    assert model.load().num_prefix_hit_tokens == 0
    again = [msgspec.structs.replace(r, request_id=f"again-{r.request_id}") for r in requests]
    assert [model.answer([request]) for request in again] == first
    assert model.load().num_prefix_hit_tokens == len(own) * 48


def _log_probabilities(model: InProcessEngine, adapter: str) -> list[dict[int, float]]:
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=1, logprobs=20)
    rng = random.Random(3)
    return model.log_probabilities(
        [
            GenerateRequest(
                request_id=str(place),
                prompt_token_ids=[rng.randrange(320) for _ in range(30)],
                work=Work(sampling, adapter=adapter),
            )
            for place in range(6)
        ]
    )


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_models(adapted: Adapted, backend: str, quantization: str) -> None:
    """Rounding moves an adapter's answers as far as the model's own, and these have the bits that they had."""
    options = {"dtype": "float32", "quantization": quantization}
    exact = engine(adapted.directory, backend, adapters=adapted.adapters, dtype="float32")
    rounded = engine(adapted.directory, backend, adapters=adapted.adapters, **options)
    plain = engine(adapted.directory, backend, **options)
    assert _log_probabilities(rounded, "") == _log_probabilities(plain, "")

    def distance(adapter: str) -> float:
        pairs = zip(
            _log_probabilities(exact, adapter), _log_probabilities(rounded, adapter), strict=True
        )
        gaps = [abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys()]
        return sum(gaps) / len(gaps)

    assert distance(adapted.adapters[0].digest) < 2 * distance("")


# ---- the same bits in any company


def _runner(adapted: Adapted, **options: Any) -> Runner:
    sizes = {"num_blocks": 64, "block_size": 16, "max_num_seqs": 16, "max_model_len": 96}
    config = WorkerConfig(
        model=str(adapted.directory), adapters=adapted.adapters, **sizes | options
    )
    runner = load_runner(plan_worker(config), Tracer("worker")).runner
    assert isinstance(runner, Runner)
    return runner


def _steps(runner: Runner, chosen: list[int], adapters: list[str], chunk: int) -> dict[int, Any]:
    """Log-probabilities of four tokens of each slot, whose prompts are computed in chunks."""
    rng = random.Random(9)
    prompts = [[rng.randrange(320) for _ in range(rng.randint(1, 50))] for _ in adapters]
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=9, logprobs=5)
    starts = [
        SlotStart(
            slot,
            prompts[slot],
            len(prompts[slot]),
            0,
            [list(range(4 * slot, 4 * slot + 4))],
            Work(sampling, adapter=adapters[slot]),
        )
        for slot in chosen
    ]
    computed, drawn = dict.fromkeys(chosen, 0), {slot: [] for slot in chosen}
    step = 0
    while any(len(drawn[slot]) < 4 for slot in chosen):
        active = [slot for slot in chosen if len(drawn[slot]) < 4]
        shares = [min(chunk, len(prompts[s]) + len(drawn[s]) - computed[s]) for s in active]
        result = runner.submit(StepPlan(step, active, shares, starts if step == 0 else [])).result()
        assert isinstance(result, StepResult)
        assert not result.errors
        for slot, share in zip(active, shares, strict=True):
            computed[slot] += share
        for slot in result.slots:
            drawn[slot] += result.logprobs[slot]
        step += 1
    runner.submit(StepPlan(step, [], [], freed_slots=chosen)).result()
    return drawn


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alone_batched_and_chunked(
    adapted: Adapted, backend: str, dtype: str, quantization: str
) -> None:
    options = {"backend": backend, "dtype": dtype, "quantization": quantization}
    runner = _runner(adapted, num_threads=2, **options)
    digests = [adapter.digest for adapter in adapted.adapters]
    adapters = [["", *digests][slot % 4] for slot in range(12)]
    everyone = list(range(12))
    together = _steps(runner, everyone, adapters, 100)
    assert _steps(runner, everyone, adapters, 7) == together
    for slot in range(8):
        assert _steps(runner, [slot], adapters, 100)[slot] == together[slot]
    assert _steps(runner, [3, 5, 8, 9], adapters, 13) == {s: together[s] for s in (3, 5, 8, 9)}
    # Rows without an adapter have the bits of a model that has none.
    plain = load_runner(
        plan_worker(
            WorkerConfig(
                model=str(adapted.directory),
                num_blocks=64,
                block_size=16,
                max_num_seqs=16,
                max_model_len=96,
                num_threads=2,
                **options,
            )
        ),
        Tracer("worker"),
    ).runner
    assert isinstance(plain, Runner)
    assert _steps(plain, [0, 4, 8], [""] * 12, 100) == {s: together[s] for s in (0, 4, 8)}


# ---- loading


def test_adapters_come_and_go(adapted: Adapted, backend: str) -> None:
    config = WorkerConfig(
        model=str(adapted.directory),
        backend=backend,
        num_blocks=64,
        block_size=16,
        max_num_seqs=16,
        max_model_len=96,
        loads_adapters=True,
    )
    loaded = load_runner(plan_worker(config), Tracer("worker"))
    runner, loader = loaded.runner, loaded.adapters
    assert isinstance(runner, Runner)
    first, second, _ = adapted.adapters
    plain = _steps(runner, [0], [""], 100)
    loader.load(first)
    own = _steps(runner, [0], [first.digest], 100)
    loader.load(second)
    loader.load(first)  # it is there already
    other = _steps(runner, [0], [second.digest], 100)
    assert own != plain != other != own
    loader.unload(first.digest)
    loader.unload(first.digest)
    with pytest.raises(ValueError, match="is not loaded"):
        _steps(runner, [0], [first.digest], 100)
    assert _steps(runner, [0], [second.digest], 100) == other
    loader.load(first)
    assert _steps(runner, [0], [first.digest], 100) == own
    assert _steps(runner, [0], [""], 100) == plain


def test_an_adapter_that_has_changed_is_not_loaded(adapted: Adapted, tmp_path: Path) -> None:
    model = make_model("qwen3", num_hidden_layers=3)
    adapter = _adapter(save_adapter(model, tmp_path / "mine", seed=1))
    save_adapter(model, tmp_path / "mine", seed=2)
    with pytest.raises(ConfigError, match="have changed"):
        plan_worker(WorkerConfig(model=str(adapted.directory), adapters=(adapter,)))


def test_adapters_take_memory_of_steps(
    adapted: Adapted, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend != "cpu":
        pytest.skip("what functions take is not seen")
    taken: list[int] = []

    def measured(plan: WorkerMemoryPlan, _: int, step_bytes: int) -> int:
        taken.append(step_bytes)
        return plan.num_blocks

    monkeypatch.setattr(loading, "measured_blocks", measured)
    sizes: dict[str, Any] = {"num_blocks": 64, "max_model_len": 64, "loads_adapters": True}
    for adapters in ((), adapted.adapters):
        config = WorkerConfig(model=str(adapted.directory), adapters=adapters, **sizes)
        load_runner(plan_worker(config), Tracer("worker"))
    assert taken[1] > taken[0]


def test_adapters_take_memory_of_the_kv_cache(adapted: Adapted) -> None:
    sizes = {"kv_cache_memory_bytes": 2**20, "max_model_len": 64}
    plain = plan_worker(WorkerConfig(model=str(adapted.directory), **sizes))
    own = plan_worker(
        WorkerConfig(model=str(adapted.directory), adapters=adapted.adapters, **sizes)
    )
    assert own.weight_bytes > plain.weight_bytes
    torch.set_num_threads(1)
