# SPDX-License-Identifier: Apache-2.0
"""Servers of an encoder, a cross-encoder and a decoder that is asked answer as transformers computes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from encoder_models import make_encoder
from gguf_encoders import save_gguf_encoder
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from pagoda.cli.server_process import server_process

WORDS = set("the sun rises in east moon is made of rock rain falls on green fields where".split())  # noqa: SIM905
QUERY = "where is the moon"
TEXTS = ["the moon is made of rock", "rain falls", "the sun rises in the east " * 4]
TEMPLATE = (
    "{% for message in messages %}{{ '[' + message.role + '] ' }}"
    "{% if message.role == 'query' or message.role == 'document' %}{{ message.content }}"
    "{% endif %}{% endfor %} is the"
)
Ask = Any


def _tokenizer() -> Tokenizer:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(WORDS)])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(special)
    return tokenizer


TOKENIZER = _tokenizer()


def _save(directory: Path, kind: str, **options: Any) -> transformers.PreTrainedModel:
    directory.mkdir(exist_ok=True)
    model = make_encoder(kind, vocab_size=40, max_position_embeddings=64, **options)
    model.save_pretrained(directory)
    TOKENIZER.save(str(directory / "tokenizer.json"))
    return model


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


@contextmanager
def _serving(model: Path, *options: str) -> Iterator[Ask]:
    def ask(route: str, body: Any) -> Any:
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.base_url}{route}", data, kind)
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)["error"] | {"status": error.code}

    with server_process([str(model), *options, "--log-level", "warning"]) as server:
        yield ask


@torch.no_grad()
def _score(model: Any, query: str, document: str, most: int | None = None) -> float:
    if most is not None:
        TOKENIZER.enable_truncation(most, strategy="longest_first")
    encoding = TOKENIZER.encode(query, document)
    TOKENIZER.no_truncation()
    ids, types = torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids])
    return float(model(ids, token_type_ids=types).logits[0, 0])


@torch.no_grad()
def _logits(model: Any, text: str) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([TOKENIZER.encode(text).ids])).logits
    return logits


@torch.no_grad()
def _mean(model: Any, text: str) -> torch.Tensor:
    """The vector of a text, of length one."""
    states = model(torch.tensor([TOKENIZER.encode(text).ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(states.mean(0), dim=0)


def test_an_encoder(tmp_path: Path) -> None:
    model = _save(tmp_path, "BertModel")
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{k}", "path": p} for k, p in kinds.items()]
    _write(tmp_path / "modules.json", modules)
    _write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    prompts = {"query": "where is ", "document": ""}
    _write(tmp_path / "config_sentence_transformers.json", {"prompts": prompts})

    def expected(text: str) -> torch.Tensor:
        return _mean(model, text)

    with _serving(tmp_path) as ask:

        def vectors(**body: Any) -> torch.Tensor:
            data = ask("/v1/embeddings", body)["data"]
            return torch.tensor([one["embedding"] for one in data])

        found = vectors(input=TEXTS)
        torch.testing.assert_close(
            found, torch.stack([expected(text) for text in TEXTS]), atol=1e-5, rtol=1e-4
        )
        assert torch.equal(vectors(input=TEXTS[1:2]), found[1:2])
        torch.testing.assert_close(
            vectors(input="the moon", prompt_name="query")[0],
            expected("where is the moon"),
            atol=1e-5,
            rtol=1e-4,
        )
        assert (
            "must be the name of a prompt"
            in ask("/v1/embeddings", {"input": "a", "prompt_name": "x"})["message"]
        )
        long = {"input": "moon " * 100}
        assert "maximum context length is 64 tokens" in ask("/v1/embeddings", long)["message"]
        cut = vectors(**long, truncate_prompt_tokens=-1)[0]
        torch.testing.assert_close(cut, expected("moon " * 62), atol=1e-5, rtol=1e-4)
        ranked = ask("/v1/rerank", {"query": QUERY, "documents": TEXTS})["results"]
        cosines = [float(expected(QUERY) @ expected(text)) for text in TEXTS]
        for one in ranked:
            assert one["relevance_score"] == pytest.approx(cosines[one["index"]], abs=1e-5)
        for route, body in (
            ("/v1/completions", {"prompt": "the moon"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/completions", {"prompt": "the moon", "max_tokens": 0, "echo": True}),
        ):
            error = ask(route, body)
            assert error["status"] == 400
            assert error["message"] == (
                "model gives vectors of texts and generates none; ask POST /v1/embeddings."
            )


def test_an_encoder_in_a_gguf_file(tmp_path: Path) -> None:
    """The file brings the vocabulary and the pooling."""
    model = make_encoder("BertModel", vocab_size=40, max_position_embeddings=64)
    vocabulary = TOKENIZER.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special, control, normal = 4, 3, 1
    words = tokens[special:]
    tokenizer = {
        "model": "bert",
        "tokens": [*tokens[:special], *(f"▁{word}" for word in words)],
        "token_type": special * [control] + len(words) * [normal],
        "unknown_token_id": 1,
        "cls_token_id": 2,
        "seperator_token_id": 3,
    }
    more = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    save_gguf_encoder(model, tmp_path / "m.gguf", {**more, "bert.pooling_type": 1})
    with _serving(tmp_path / "m.gguf", "--dtype", "float32") as ask:
        data = ask("/v1/embeddings", {"input": TEXTS})["data"]
    found = torch.tensor([one["embedding"] for one in data])
    expected = torch.stack([_mean(model, text) for text in TEXTS])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_cross_encoder(tmp_path: Path) -> None:
    model = _save(tmp_path, "BertForSequenceClassification", num_labels=1)
    raw = [_score(model, QUERY, text) for text in TEXTS]
    with _serving(tmp_path) as ask:
        data = ask("/v1/score", {"text_1": QUERY, "text_2": TEXTS})["data"]
        scores = [one["score"] for one in data]
        assert scores == pytest.approx(torch.tensor(raw).sigmoid().tolist(), abs=1e-5)
        pairs = ask("/v1/score", {"text_1": TEXTS, "text_2": TEXTS[::-1]})["data"]
        expected = [_score(model, *pair) for pair in zip(TEXTS, TEXTS[::-1], strict=True)]
        assert [one["score"] for one in pairs] == pytest.approx(
            torch.tensor(expected).sigmoid().tolist(), abs=1e-5
        )
        ranked = ask("/v1/rerank", {"query": QUERY, "documents": TEXTS})
        order = sorted(range(3), key=lambda index: -raw[index])
        assert [one["index"] for one in ranked["results"]] == order
        tokens = sum(len(TOKENIZER.encode(QUERY, text).ids) for text in TEXTS)
        assert ranked["usage"]["prompt_tokens"] == tokens
        whole = ask("/rerank", {"query": QUERY, "texts": TEXTS, "raw_scores": True})
        assert {one["index"]: one["score"] for one in whole} == pytest.approx(
            dict(enumerate(raw)), abs=1e-4
        )
        long = {"text_1": QUERY, "text_2": "moon " * 100}
        assert "maximum context length is 64 tokens" in ask("/v1/score", long)["message"]
        for most in (64, 10, 7):
            body = {**long, "truncate_prompt_tokens": most}
            [one] = ask("/v1/score", body)["data"]
            cut = torch.tensor(_score(model, QUERY, "moon " * 100, most))
            assert one["score"] == pytest.approx(float(cut.sigmoid()), abs=1e-5)
        error = ask("/v1/embeddings", {"input": "moon"})["message"]
        assert error.startswith("model gives scores of pairs of texts, no vectors")
        error = ask("/v1/completions", {"prompt": "moon"})["message"]
        assert error.startswith("model gives scores of texts and generates none")


def test_labels_of_texts(tmp_path: Path) -> None:
    names = {0: "joy", 1: "fear", 2: "none"}
    model = _save(tmp_path, "DistilBertForSequenceClassification", id2label=names)
    logits = torch.stack([_logits(model, text)[0] for text in TEXTS])
    with _serving(tmp_path) as ask:
        answer = ask("/classify", {"input": TEXTS})
        for index, one in enumerate(answer["data"]):
            assert one["probs"] == pytest.approx(logits[index].softmax(0).tolist(), abs=1e-5)
            assert (one["index"], one["num_classes"]) == (index, 3)
            assert one["label"] == names[int(logits[index].argmax())]
        assert answer["usage"]["prompt_tokens"] == sum(len(TOKENIZER.encode(t).ids) for t in TEXTS)
        [raw] = ask("/pooling", {"input": TEXTS[0], "use_activation": False})["data"]
        assert raw["data"] == pytest.approx(logits[0].tolist(), abs=1e-4)
        for route, body, message in (
            ("/v1/embeddings", {"input": "moon"}, "gives labels of texts, no vectors"),
            ("/v1/completions", {"prompt": "moon"}, "gives labels of texts and generates none"),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}, "gives labels of texts, no vectors"),
            ("/pooling", {"input": "moon", "task": "embed"}, "task must be classify"),
            ("/classify", {"input": "moon", "pooling": "mean"}, "pooling is for models"),
        ):
            error = ask(route, body)
            assert error["status"] == 400
            assert message in error["message"]


def test_labels_of_tokens(tmp_path: Path) -> None:
    model = _save(tmp_path, "BertForTokenClassification", num_labels=4)
    with _serving(tmp_path) as ask:
        data = ask("/pooling", {"input": TEXTS, "task": "token_classify"})["data"]
        for text, one in zip(TEXTS, data, strict=True):
            expected = _logits(model, text)[0].softmax(-1)
            torch.testing.assert_close(torch.tensor(one["data"]), expected, atol=1e-5, rtol=1e-4)
        assert "gives labels of tokens" in ask("/classify", {"input": "moon"})["message"]


def test_vectors_of_tokens(tmp_path: Path) -> None:
    """As ColBERT has them: ranks are by the highest products of each of the query's tokens."""
    model = _save(tmp_path, "ModernBertModel", pad_token_id=0)
    tensors = load_file(tmp_path / "model.safetensors")
    narrow = torch.randn(24, 64)
    save_file(tensors | {"linear.weight": narrow}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    _write(tmp_path / "config.json", config | {"architectures": ["ColBERTModernBertModel"]})

    @torch.no_grad()
    def expected(text: str) -> torch.Tensor:
        states = model(torch.tensor([TOKENIZER.encode(text).ids])).last_hidden_state[0]
        return torch.nn.functional.normalize(states @ narrow.t(), dim=1)

    with _serving(tmp_path) as ask:
        for one, text in zip(ask("/pooling", {"input": TEXTS})["data"], TEXTS, strict=True):
            found = torch.tensor(one["data"])
            torch.testing.assert_close(found, expected(text), atol=1e-5, rtol=1e-4)
        ranked = ask("/v1/rerank", {"query": QUERY, "documents": TEXTS})["results"]
        scores = [float((expected(QUERY) @ expected(t).t()).amax(1).sum()) for t in TEXTS]
        for one in ranked:
            assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=1e-4)
        [pair] = ask("/v1/score", {"text_1": QUERY, "text_2": TEXTS[1]})["data"]
        assert pair["score"] == pytest.approx(scores[1], abs=1e-4)
        error = ask("/v1/embeddings", {"input": "moon", "dimensions": 8})["message"]
        assert "dimensions is of vectors of whole texts" in error


def test_a_decoder_that_is_asked(tmp_path: Path) -> None:
    """As Qwen3-Reranker: a template of query and document, and the logits of two tokens."""
    shape = {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
    model = _save(tmp_path, "Qwen3ForCausalLM", **shape)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    name = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    _write(tmp_path / "modules.json", [{"type": name, "path": "1_LogitScore"}])
    _write(tmp_path / "1_LogitScore" / "config.json", {"true_token_id": 9, "false_token_id": 5})

    def expected(document: str) -> float:
        text = f"[query] {QUERY}[document] {document} is the"
        ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        return float((logits[9] - logits[5]).sigmoid())

    with _serving(tmp_path) as ask:
        ranked = ask("/v1/rerank", {"query": QUERY, "documents": TEXTS})["results"]
        for one in ranked:
            score = expected(TEXTS[one["index"]])
            assert one["relevance_score"] == pytest.approx(score, abs=1e-5)
        long = {"query": QUERY, "documents": ["moon " * 100], "truncate_prompt_tokens": 40}
        [cut] = ask("/v1/rerank", long)["results"]
        around = len(
            TOKENIZER.encode(f"[query] {QUERY}[document] is the", add_special_tokens=False).ids
        )
        score = expected("moon " * (40 - around))
        assert cut["relevance_score"] == pytest.approx(score, abs=1e-5)
        assert ask("/v1/completions", {"prompt": "the moon", "max_tokens": 2})["choices"]
