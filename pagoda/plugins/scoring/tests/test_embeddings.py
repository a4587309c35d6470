# SPDX-License-Identifier: Apache-2.0
"""Vectors, scores and ranks of texts, by the vectors of the simulated model."""

from __future__ import annotations

import base64
import math
from array import array
from typing import Any

import pytest
from scripted_endpoint import TEXT
from tables import each_row

from pagoda.fleet.adapters import AdapterRegistry
from pagoda.messages.adapters import Adapter
from pagoda.messages.frontend import Pooling
from pagoda.messages.worker_config import WorkerConfig
from pagoda.plugins.sim.model import sim_embedding, sim_logprob
from pagoda.text.text_generator import TextGenerator


def vector_of(text: str | list[int], dimensions: int = 8) -> list[float]:
    ids = list(text.encode()) if isinstance(text, str) else text
    vector = array("f", sim_embedding(ids))[:dimensions]
    return [x / math.hypot(*vector) for x in vector]


def cosine_of(one: str, other: str) -> float:
    return sum(x * y for x, y in zip(vector_of(one), vector_of(other), strict=True))


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("hello", ["hello"]),
        (["a", "bc"], ["a", "bc"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
@pytest.mark.parametrize("route", ["/v1/embeddings", "/embeddings", "/pooling"])
async def test_embeddings(api, given: Any, texts: list[Any], route: str) -> None:
    answer = (await api.post(route, {"model": "tiny", "input": given})).json()
    key = "data" if route == "/pooling" else "embedding"
    assert [item["index"] for item in answer["data"]] == list(range(len(texts)))
    for item, text in zip(answer["data"], texts, strict=True):
        assert item[key] == pytest.approx(vector_of(text), abs=1e-6)
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    num_tokens = sum(map(len, texts))
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (num_tokens, num_tokens)
    for request in api.endpoint.requests:
        assert (request.work.pooling, request.work.sampling.max_tokens) == (Pooling.LAST, 0)


async def test_forms_of_vectors(api) -> None:
    async def embedding(**body: Any) -> Any:
        answer = await api.post("/v1/embeddings", {"input": "abc", **body})
        return answer.json()["data"][0]["embedding"]

    raw = array("f", sim_embedding(list(b"abc"))).tolist()
    assert await embedding(normalize=False) == raw
    encoded = await embedding(encoding_format="base64", normalize=False)
    assert array("f", base64.b64decode(encoded)).tolist() == raw
    assert await embedding(dimensions=3) == pytest.approx(vector_of("abc", 3), abs=1e-6)
    await embedding(pooling="mean", user="me")
    assert api.endpoint.requests[-1].work.pooling is Pooling.MEAN


@pytest.mark.parametrize(("most", "kept"), [(2, b"ab"), (5, b"abcde"), (-1, b"abcdef")])
async def test_long_texts_are_cut_if_they_may_be(api, most: int, kept: bytes) -> None:
    for given in ("abcdef", list(b"abcdef")):
        await api.post("/v1/embeddings", {"input": given, "truncate_prompt_tokens": most})
        assert api.endpoint.requests[-1].prompt_token_ids == list(kept)


async def test_a_text_longer_than_the_context_is_cut_to_it(api) -> None:
    refused = await api.post("/v1/embeddings", {"input": "x" * 300})
    assert refused.error()["param"] == "input"
    await api.post("/v1/embeddings", {"input": "x" * 300, "truncate_prompt_tokens": -1})
    assert len(api.endpoint.requests[-1].prompt_token_ids) == 256


@pytest.mark.parametrize("route", ["/v1/score", "/score"])
@pytest.mark.parametrize(
    ("body", "pairs"),
    [
        ({"text_1": "a", "text_2": "b"}, [("a", "b")]),
        ({"text_1": "a", "text_2": ["b", "cd"]}, [("a", "b"), ("a", "cd")]),
        ({"text_1": ["a", "x"], "text_2": ["b", "x"]}, [("a", "b"), ("x", "x")]),
        ({"queries": "a", "documents": ["b"]}, [("a", "b")]),
        ({"data_1": ["a"], "data_2": ["b", "a"]}, [("a", "b"), ("a", "a")]),
    ],
)
async def test_scores(api, route: str, body: dict[str, Any], pairs: list[tuple[str, str]]) -> None:
    answer = (await api.post(route, body)).json()
    scores = [item["score"] for item in answer["data"]]
    assert scores == pytest.approx([cosine_of(*pair) for pair in pairs], abs=1e-6)
    assert [item["index"] for item in answer["data"]] == list(range(len(pairs)))


@pytest.mark.parametrize("route", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_ranked(api, route: str) -> None:
    texts = ["first", "query", "second", "third one"]
    body = {"query": "query", "documents": [texts[0], {"text": texts[1]}, *texts[2:]]}
    answer = (await api.post(route, body)).json()
    scores = [cosine_of("query", text) for text in texts]
    order = sorted(range(4), key=lambda index: -scores[index])
    assert [one["index"] for one in answer["results"]] == order
    assert order[0] == 1
    best = answer["results"][0]
    assert best["document"] == {"text": "query"}
    assert best["relevance_score"] == pytest.approx(1, abs=1e-6)
    assert answer["usage"]["total_tokens"] == sum(map(len, ["query", *texts]))
    few = (await api.post(route, {**body, "top_n": 2, "return_documents": False})).json()
    assert [one.keys() for one in few["results"]] == [{"index", "relevance_score"}] * 2


@pytest.mark.parametrize("item_first", [False, True])
async def test_labels_are_scored_behind_items(api, item_first: bool) -> None:
    labels = [10, 20, 30]
    body = {"query": "q", "items": ["ab", list(b"c")], "label_token_ids": labels}
    route = "/generative_scoring"
    answer = (await api.post(route, {**body, "item_first": item_first})).json()
    last = [ord("q")] * 2 if item_first else [ord("b"), ord("c")]
    logprobs = [[sim_logprob(token_id, label) for label in labels] for token_id in last]
    weights = [[math.exp(one) for one in own] for own in logprobs]
    scores = [item["score"] for item in answer["data"]]
    assert scores == pytest.approx([own[0] / sum(own) for own in weights])
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    request = api.endpoint.requests[0]
    assert request.num_scored_tokens == len(request.prompt_token_ids) - 1
    whole = (await api.post(route, {**body, "apply_softmax": False})).json()
    assert whole["data"][0]["score"] == pytest.approx(math.exp(sim_logprob(ord("b"), 10)))


@each_row(
    ("route", "body", "param"),
    [
        ("/generative_scoring", {"query": "q", "items": ["a"]}, "label_token_ids"),
        (
            "/generative_scoring",
            {"query": "q", "items": [], "label_token_ids": [1]},
            "items",
        ),
        (
            "/generative_scoring",
            {"query": "q", "items": ["a"], "label_token_ids": [512]},
            "label_token_ids",
        ),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [512]}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 9}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ("/v1/embeddings", {"input": "a", "pooling": "cls"}, "pooling"),
        ("/v1/embeddings", {"input": "a", "pooling": "score"}, "pooling"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
        ("/v1/score", {"text_1": "a", "text_2": ["a", ""]}, "text_2[1]"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b", "c"], "text_2": ["a", "b"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "queries": "b"}, "text_1"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"documents": ["b"]}, "query"),
    ],
)
async def test_bad_bodies_name_the_field(api, route: str, body: dict[str, Any], param: str) -> None:
    answer = await api.post(route, body)
    assert (answer.status, answer.error()["param"]) == (400, param)


async def test_a_failure_of_the_engine_is_not_shown(api) -> None:
    api.endpoint.breaks_prompts = True
    answer = await api.post("/v1/embeddings", {"input": ["a", "b"]})
    assert answer.status == 500
    assert "broke" not in answer.error()["message"]


async def test_ranks_in_the_form_of_text_embeddings_inference(api) -> None:
    texts = ["xyz", "abd", "abc"]
    body = {"query": "abc", "texts": texts, "top_n": 2}
    for route in ("/rerank", "/reranking", "/v1/reranking"):
        answer = (await api.post(route, body)).json()
        assert [one.keys() for one in answer] == [{"index", "score"}] * 2
        assert answer[0] == {"index": 2, "score": pytest.approx(1.0, abs=1e-6)}
    answer = (await api.post("/rerank", {**body, "return_text": True})).json()
    assert answer[0]["text"] == "abc"
    await api.post("/rerank", {**body, "texts": ["x" * 300], "truncate": True})
    assert len(api.endpoint.requests[-1].prompt_token_ids) == 256
    for wrong, param in (
        ({"query": "a"}, "documents"),
        ({"query": "a", "texts": []}, "texts"),
        ({"query": "a", "texts": ["a"], "documents": ["a"]}, "texts"),
        ({"query": "a", "documents": ["a"], "return_text": True}, "return_text"),
    ):
        assert (await api.post("/rerank", wrong)).error()["param"] == param


@pytest.mark.parametrize("route", ["/v1/embeddings", "/v1/score", "/v1/rerank"])
async def test_an_adapter_answers_with_its_name(api, route: str) -> None:
    adapter = Adapter("sql", "/adapters/sql", "0" * 64)
    registry = AdapterRegistry(WorkerConfig(model="tiny", adapters=(adapter,)))
    api.service.generator = TextGenerator(api.endpoint, TEXT, api.service.tracker, registry)
    body = {
        "/v1/embeddings": {"input": "a"},
        "/v1/score": {"text_1": "a", "text_2": "b"},
        "/v1/rerank": {"query": "a", "documents": ["b"]},
    }[route]
    assert (await api.post(route, {"model": "sql", **body})).json()["model"] == "sql"
    [shown] = (await api.get("/lora-adapters")).json()
    assert shown == {"id": 0, "path": "/adapters/sql", "scale": 0.0, "name": "sql"}
