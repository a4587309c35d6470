# SPDX-License-Identifier: Apache-2.0
"""Vectors and scores of encoders are those of transformers, with the same bits in any company."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from encoder_models import ENCODERS, HEADS, MASKED, RANKERS, make_encoder
from gguf_encoders import save_gguf_encoder, save_gguf_rotary
from gguf_models import save_gguf
from in_process import InProcessEngine
from own_code_models import as_makers_publish, make_like
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from torch import Tensor

from pagoda.checkpoints.config_json import read_model_config
from pagoda.errors import ConfigError
from pagoda.messages.frontend import GenerateRequest, Pooling, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.worker.loading import plan_worker

PROMPTS = [
    [random.Random(n).randrange(2, 320) for _ in range(n)] for n in (1, 2, 33, 160, 70, 70, 64)
]
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "a few at a time": {"max_num_batched_tokens": 80},
    "one at a time": {"max_num_batched_tokens": 1},
    "few blocks": {"block_size": 4, "num_blocks": 41},
    "tp 2": {"parallel": ParallelConfig(tensor_parallel_size=2)},
    "pp 2": {"parallel": ParallelConfig(pipeline_parallel_size=2)},
}
Model = tuple[Path, transformers.PreTrainedModel]


def _requests(pooling: Pooling, second: int = 0) -> list[GenerateRequest]:
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=0)
    return [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=prompt,
            work=Work(sampling, pooling=pooling, second_text_at=min(second, len(prompt) - 1)),
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def _vectors(engine: InProcessEngine, requests: Sequence[GenerateRequest]) -> dict[str, Tensor]:
    return {
        chunk.request_id: torch.tensor(array("f", chunk.embedding))
        for chunk in engine.chunks(requests)
        if chunk.embedding is not None
    }


def _engine(directory: Path, backend: str = "auto", **options: Any) -> InProcessEngine:
    return InProcessEngine(directory, backend=backend, enable_prefix_caching=True, **options)


def _pooled(states: Tensor, pooling: Pooling) -> Tensor:
    """One vector of hidden states [n, hidden]."""
    if pooling is Pooling.MEAN:
        return states.mean(0)
    return states[0] if pooling is Pooling.FIRST else states[-1]


def _body(model: transformers.PreTrainedModel) -> Any:
    return getattr(model, model.base_model_prefix, model)


@pytest.fixture(scope="module", params=ENCODERS)
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp(request.param)
    kind, options = ENCODERS[request.param]
    model = make_encoder(kind, **options)
    model.save_pretrained(directory)
    return directory, model


@pytest.mark.parametrize("pooling", [Pooling.FIRST, Pooling.MEAN, Pooling.LAST])
def test_vectors_are_those_of_transformers(encoder: Model, backend: str, pooling: Pooling) -> None:
    found = _vectors(_engine(encoder[0], backend), _requests(pooling))
    for index, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            states = _body(encoder[1])(torch.tensor([prompt])).last_hidden_state[0]
        torch.testing.assert_close(
            found[str(index)], _pooled(states, pooling), atol=5e-5, rtol=5e-5
        )


@pytest.mark.parametrize("way", WAYS)
def test_bits_do_not_depend_on_the_way(encoder: Model, way: str) -> None:
    requests = _requests(Pooling.MEAN)
    alone = _engine(encoder[0])
    expected = {id_: it for request in requests for id_, it in _vectors(alone, [request]).items()}
    engine = _engine(encoder[0], **WAYS[way])
    for _ in range(2):  # nothing is found in a cache
        found = _vectors(engine, requests)
        for name, vector in expected.items():
            if way == "tp 2":  # sums of two parts
                torch.testing.assert_close(found[name], vector, atol=1e-5, rtol=1e-4)
            else:
                assert torch.equal(found[name], vector)
    load = engine.load()
    assert (load.num_prefix_hit_tokens, load.num_preemptions) == (0, 0)
    assert load.num_free_blocks == load.num_blocks


@pytest.mark.parametrize("name", RANKERS)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path, backend: str) -> None:
    kind, options = RANKERS[name]
    model = make_encoder(kind, num_labels=1, **options)
    model.save_pretrained(tmp_path)
    second = 20 if model.config.to_dict().get("type_vocab_size") == 2 else 0
    requests = _requests(Pooling.SCORE, second)
    for ways in ({}, WAYS["tp 2"], WAYS["pp 2"]):
        found = _vectors(_engine(tmp_path, backend, **ways), requests)
        for request in requests:
            ids = torch.tensor([request.prompt_token_ids])
            types = {}
            if second:
                begin = request.work.second_text_at or ids.shape[1]
                types = {"token_type_ids": (torch.arange(ids.shape[1]) >= begin).long()[None]}
            with torch.no_grad():
                expected = model(ids, **types).logits[0]
            torch.testing.assert_close(found[request.request_id], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights(tmp_path: Path, quantization: str) -> None:
    """Vectors point where those of dense weights do."""
    model = make_encoder(
        "BertModel", hidden_size=128, intermediate_size=256, initializer_range=0.08
    )
    model.save_pretrained(tmp_path)
    requests = _requests(Pooling.MEAN)
    dense = _vectors(_engine(tmp_path), requests)
    rounded = _vectors(_engine(tmp_path, quantization=quantization), requests)
    least = {"int8": 0.999, "int4": 0.98}[quantization]
    for name, vector in dense.items():
        assert torch.cosine_similarity(vector, rounded[name], dim=0) > least
    assert not torch.equal(dense["3"], rounded["3"])


def test_kv_is_that_of_one_layer(tmp_path: Path) -> None:
    make_encoder("BertModel").save_pretrained(tmp_path)
    plan = plan_worker(WorkerConfig(model=str(tmp_path), dtype="float32", num_blocks=16))
    assert len(plan.kv_groups[0].layers) == 3
    assert plan.bytes_per_block == 16 * 2 * 64 * 4


def test_an_encoder_generates_nothing(tmp_path: Path) -> None:
    make_encoder("BertModel").save_pretrained(tmp_path)
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=3)
    request = GenerateRequest(request_id="a", prompt_token_ids=[1, 2], work=Work(sampling))
    with pytest.raises(RuntimeError, match="gives vectors or scores of texts and generates none"):
        _engine(tmp_path).answer([request])


def test_old_names_of_norms(tmp_path: Path) -> None:
    """Files that were made from TensorFlow's call weights of norms gamma and beta."""
    model = make_encoder("BertModel")
    model.save_pretrained(tmp_path)
    requests = _requests(Pooling.FIRST)
    expected = _vectors(_engine(tmp_path), requests)
    tensors = load_file(tmp_path / "model.safetensors")
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    for end, old in ends.items():
        renamed = {name.replace(end, old): tensor for name, tensor in renamed.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    found = _vectors(_engine(tmp_path), requests)
    assert all(torch.equal(vector, found[name]) for name, vector in expected.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is not supported"),
        ({"hidden_act": "relu6"}, "hidden_act must be 'gelu' or 'gelu_pytorch_tanh' or 'relu' or"),
        ({"is_decoder": True}, "is_decoder is not supported"),
    ],
)
def test_other_arithmetic_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    model = make_encoder("BertModel")
    for name, value in options.items():
        setattr(model.config, name, value)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        _engine(tmp_path)


@pytest.mark.parametrize("name", HEADS)
def test_labels_are_those_of_transformers(name: str, tmp_path: Path, backend: str) -> None:
    kind, options = HEADS[name]
    model = make_encoder(kind, num_labels=3, **options)
    model.save_pretrained(tmp_path)
    head = read_model_config(tmp_path).classifier
    assert head is not None
    pooling = Pooling.SCORE_ALL if head.sees_all else Pooling.SCORE
    ways = [{}] if name.startswith("roberta") else [{}, WAYS["tp 2"]]
    for way in ways:
        found = _vectors(_engine(tmp_path, backend, **way), _requests(pooling))
        for index, prompt in enumerate(PROMPTS):
            with torch.no_grad():
                expected = model(torch.tensor([prompt])).logits[0].flatten()
            torch.testing.assert_close(found[str(index)], expected, atol=5e-5, rtol=5e-5)


def test_vectors_of_tokens(tmp_path: Path, backend: str) -> None:
    """As ColBERT has them, and those of any encoder."""
    model = make_encoder("BertModel")
    model.save_pretrained(tmp_path)
    found = _vectors(_engine(tmp_path, backend), _requests(Pooling.ALL))
    tensors = load_file(tmp_path / "model.safetensors")
    narrow = torch.randn(24, 64)
    save_file(tensors | {"linear.weight": narrow}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["HF_ColBERT"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    mapped = _vectors(_engine(tmp_path, backend), _requests(Pooling.ALL))
    for index, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            states = model(torch.tensor([prompt])).last_hidden_state[0]
        for own, wanted in ((found, states), (mapped, states @ narrow.t())):
            vectors = own[str(index)].view(len(prompt), -1)
            torch.testing.assert_close(vectors, wanted, atol=1e-4, rtol=5e-5)


@pytest.mark.parametrize(
    ("kind", "architecture", "options"),
    [
        ("JinaEmbeddingsV3Model", "ColBERTJinaRobertaModel", {"type_vocab_size": 1}),
        (
            "Qwen3Model",
            "VoyageQwen3BidirectionalEmbedModel",
            {"is_causal": False, "num_key_value_heads": 2, "head_dim": 16},
        ),
    ],
)
def test_maps_that_architectures_are_named_after(
    kind: str, architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Vectors of tokens, or of texts, are narrower than hidden states."""
    model = make_encoder(kind, **options)
    model.save_pretrained(tmp_path)
    tensors, narrow = load_file(tmp_path / "model.safetensors"), torch.randn(24, 64)
    save_file(tensors | {"linear.weight": narrow}, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"architectures": [architecture]}))
    pooling = Pooling.ALL if "ColBERT" in architecture else Pooling.MEAN
    found = _vectors(_engine(tmp_path), _requests(pooling))
    for index, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            states = model(torch.tensor([prompt])).last_hidden_state[0]
        mapped = states @ narrow.t()
        wanted = mapped.flatten() if pooling is Pooling.ALL else mapped.mean(0)
        torch.testing.assert_close(found[str(index)], wanted, atol=1e-4, rtol=5e-5)


def test_rewards_of_tokens(tmp_path: Path) -> None:
    """InternLM 2's head has one map without a bias."""
    model = make_like("internlm2")
    model.save_pretrained(tmp_path)
    as_makers_publish("internlm2", tmp_path)
    head = torch.randn(1, 64)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"v_head.weight": head}, path)
    path = tmp_path / "config.json"
    named = {"architectures": ["InternLM2ForRewardModel"], "num_labels": 1}
    path.write_text(json.dumps(json.loads(path.read_bytes()) | named))
    found = _vectors(_engine(tmp_path), _requests(Pooling.SCORE_ALL))
    for index, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            states = model.model(torch.tensor([prompt])).last_hidden_state[0]
        rewards = (states @ head.t()).flatten()
        torch.testing.assert_close(found[str(index)], rewards, atol=1e-4, rtol=5e-5)


def test_vectors_of_tokens_in_pieces(tmp_path: Path) -> None:
    """A decoder gives them whatever steps its prompts are cut into, and takes none from a cache."""
    model = make_encoder("Qwen3Model", num_key_value_heads=2, head_dim=16)
    model.save_pretrained(tmp_path)
    for options in ({}, {"max_num_batched_tokens": 33}):
        engine = _engine(tmp_path, **options)
        for _ in range(2):
            found = _vectors(engine, _requests(Pooling.ALL))
            for index, prompt in enumerate(PROMPTS):
                with torch.no_grad():
                    states = model(torch.tensor([prompt])).last_hidden_state[0]
                torch.testing.assert_close(
                    found[str(index)], states.flatten(), atol=1e-4, rtol=5e-5
                )


@pytest.mark.parametrize("name", MASKED)
def test_weights_of_the_vocabulary(name: str, tmp_path: Path, backend: str) -> None:
    """As SPLADE has them."""
    kind, options = MASKED[name]
    model = make_encoder(kind, **options)
    model.save_pretrained(tmp_path)
    modules = [{"type": f"x.{kind}", "path": ""} for kind in ("MLMTransformer", "SpladePooling")]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for ways in ({}, WAYS["tp 2"], WAYS["pp 2"]):
        found = _vectors(_engine(tmp_path, backend, **ways), _requests(Pooling.SPARSE))
        for index, prompt in enumerate(PROMPTS):
            with torch.no_grad():
                highest = model(torch.tensor([prompt])).logits[0].amax(0)
            expected = torch.log1p(highest.clamp(min=0))
            torch.testing.assert_close(found[str(index)], expected, atol=5e-5, rtol=5e-5)


def test_weights_and_vectors_of_tokens(tmp_path: Path, backend: str) -> None:
    """As BGE-M3 has them, beside vectors of texts."""
    model = make_encoder("XLMRobertaModel", type_vocab_size=1, pad_token_id=1)
    model.save_pretrained(tmp_path)
    maps = {}
    for name, outputs in (("sparse_linear", 1), ("colbert_linear", 64)):
        maps[name] = {"weight": torch.randn(outputs, 64) / 8, "bias": torch.randn(outputs)}
        torch.save(maps[name], tmp_path / f"{name}.pt")
    engine = _engine(tmp_path, backend)
    found = {
        it: _vectors(engine, _requests(it)) for it in (Pooling.WEIGHTS, Pooling.ALL, Pooling.FIRST)
    }
    for index, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            states = model(torch.tensor([prompt])).last_hidden_state[0]
        mapped = {it: states @ its["weight"].t() + its["bias"] for it, its in maps.items()}
        expected = {
            Pooling.WEIGHTS: mapped["sparse_linear"].relu(),
            Pooling.ALL: mapped["colbert_linear"],
            Pooling.FIRST: states[0],
        }
        for pooling, wanted in expected.items():
            own = found[pooling][str(index)]
            torch.testing.assert_close(own, wanted.flatten(), atol=5e-5, rtol=5e-5)


def test_layers_behind_pooling(tmp_path: Path, backend: str) -> None:
    """Those of sentence-transformers, as EmbeddingGemma has them."""
    model = make_encoder("BertModel")
    model.save_pretrained(tmp_path)
    kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": "" if not i else f"{i}_{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    sizes, maps = (64, 90, 40), []
    for i in range(2):
        place = tmp_path / f"{i + 2}_Dense"
        place.mkdir()
        activation = ("Tanh", "Identity")[i]
        layer = {"in_features": sizes[i], "out_features": sizes[i + 1], "bias": i == 0}
        layer["activation_function"] = f"torch.nn.modules.activation.{activation}"
        (place / "config.json").write_text(json.dumps(layer))
        tensors = {"linear.weight": torch.randn(sizes[i + 1], sizes[i]) / 8}
        if i == 0:
            tensors["linear.bias"] = torch.randn(sizes[1])
        if i == 0:  # as older models have it
            torch.save(tensors, place / "pytorch_model.bin")
        else:
            save_file(tensors, place / "model.safetensors")
        maps.append(tensors)
    found = _vectors(_engine(tmp_path, backend), _requests(Pooling.MEAN))
    for index, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            pooled = model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        inner = torch.tanh(maps[0]["linear.weight"] @ pooled + maps[0]["linear.bias"])
        expected = maps[1]["linear.weight"] @ inner
        torch.testing.assert_close(found[str(index)], expected, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta"])
def test_vectors_of_gguf_files_are_those_of_directories(name: str, tmp_path: Path) -> None:
    kind, options = ENCODERS[name]
    model = make_encoder(kind, **options)
    model.save_pretrained(tmp_path)
    save_gguf_encoder(model, tmp_path / "m.gguf")
    requests = _requests(Pooling.MEAN)
    expected = _vectors(_engine(tmp_path), requests)
    found = _vectors(_engine(tmp_path / "m.gguf", dtype="float32"), requests)
    assert all(torch.equal(vector, found[name]) for name, vector in expected.items())


@pytest.mark.parametrize("name", ["nomic", "jina-v3", "modernbert", "eurobert", "embedding-gemma"])
def test_vectors_of_rotary_gguf_files_are_those_of_directories(name: str, tmp_path: Path) -> None:
    kind, options = ENCODERS[name]
    model = make_encoder(kind, **options)
    model.save_pretrained(tmp_path)
    maps = {}
    if name == "embedding-gemma":
        maps = {"dense_2": torch.randn(90, 64) / 8, "dense_3": torch.randn(40, 90) / 8}
    save_gguf_rotary(model, tmp_path, tmp_path / "m.gguf", maps)
    requests = _requests(Pooling.MEAN)
    expected = _vectors(_engine(tmp_path), requests)
    found = _vectors(_engine(tmp_path / "m.gguf", dtype="float32"), requests)
    for number, vector in expected.items():
        for weight in maps.values():
            vector = weight @ vector
        torch.testing.assert_close(found[number], vector, atol=1e-5, rtol=1e-5)


def test_vectors_of_a_decoder_that_sees_all_of_a_text_in_a_gguf_file(tmp_path: Path) -> None:
    """llama.cpp's converter writes LlamaBidirectionalModel as `llama-embed`."""
    model = make_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    changed = {"architectures": ["LlamaBidirectionalModel"], "is_causal": False}
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changed))
    save_gguf(model, tmp_path / "m.gguf", architecture="llama-embed")
    requests = _requests(Pooling.MEAN)
    expected = _vectors(_engine(tmp_path), requests)
    found = _vectors(_engine(tmp_path / "m.gguf", dtype="float32"), requests)
    for number, vector in expected.items():
        torch.testing.assert_close(found[number], vector, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta"])
def test_scores_of_gguf_files_are_those_of_directories(name: str, tmp_path: Path) -> None:
    kind, options = RANKERS[name]
    model = make_encoder(kind, num_labels=1, **options)
    model.save_pretrained(tmp_path)
    save_gguf_encoder(model, tmp_path / "m.gguf")
    requests = _requests(Pooling.SCORE)
    expected = _vectors(_engine(tmp_path), requests)
    found = _vectors(_engine(tmp_path / "m.gguf", dtype="float32"), requests)
    assert all(torch.equal(vector, found[name]) for name, vector in expected.items())


def test_gguf_files_without_the_layer_in_front_of_scores(tmp_path: Path) -> None:
    """llama.cpp's converter leaves out the pooler, through which scores of BERT pass."""
    model = make_encoder("BertForSequenceClassification", num_labels=1)
    save_gguf_encoder(model, tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=r"m.gguf lacks the tensor cls.weight"):
        _engine(tmp_path / "m.gguf", dtype="float32")
