# SPDX-License-Identifier: Apache-2.0
"""A server of several models: which of them a name means, what goes for each, and which takes its place."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from scripted_endpoint import TEXT, ScriptedEndpoint

from benchmarks.dispatch_scale import StaticPeer
from pagoda.api.catalogue import Catalogue, NamedModel, ServedModel, share_of
from pagoda.fleet.adapters import AdapterRegistry
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.policies import POLICIES
from pagoda.messages.adapters import Adapter
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.request_tracker import ClientRequest, RequestTracker
from pagoda.text.text_generator import TextGenerator


def client(name: str = "", key: str = "") -> ClientRequest:
    return ClientRequest(id=name, arrived_ns=0, key_name=key)


def served(
    name: str, *, endpoint: Any = None, has_host: bool = True, **rules: Any
) -> tuple[ServedModel, StaticPeer]:
    """A model with one host, which answers by itself where an `endpoint` stands for it."""
    peer = StaticPeer(f"{name}:1")
    dispatcher = Dispatcher([], POLICIES["round-robin"], max_requests=rules.pop("max_requests", 9))
    if has_host:
        dispatcher.add(peer.replica)
    model = NamedModel(name, lambda: TEXT, **rules)
    generator = TextGenerator(
        endpoint or dispatcher, TEXT, RequestTracker(), model.adapters, name=name
    )
    return ServedModel(model, generator, dispatcher), peer


async def test_a_model_is_found_by_its_names_and_by_those_of_its_adapters() -> None:
    adapter = Adapter("sql", "/adapters/sql", "digest")
    adapters = AdapterRegistry(WorkerConfig(model="m", adapters=(adapter,)))
    a, _ = served("a")
    b, _ = served("b", aliases=("bee",), adapters=adapters, keys=frozenset({"alice"}))
    models = Catalogue([a, b], {"mixed": {"a": 1.0}})
    alice, bob = client(key="alice"), client(key="bob")
    assert models.find(None, bob) == (a, None) == models.find("mixed", bob)
    assert models.find("b", alice) == (b, None) == models.find("bee", alice)
    assert models.find("sql", alice) == (b, adapter)
    assert [models.find(name, bob) for name in ("b", "bee", "sql", "c")] == [None] * 4
    assert [name for name, *_ in models.names(bob)] == ["a", "mixed"]
    assert [name for name, *_ in models.names(alice)] == ["a", "b", "bee", "mixed", "sql"]


async def test_a_key_gets_only_models_that_are_for_it(serve_api) -> None:
    """Also where it names none, any name will do, or several models share the requests of a name."""
    a, _ = served("a", endpoint=ScriptedEndpoint("first"), keys=frozenset({"alice"}))
    b, _ = served("b", endpoint=ScriptedEndpoint("second"))
    models = Catalogue([a, b], {"mixed": {"a": 1e3, "b": 1e-3}, "own": {"a": 1.0}})
    bob = client("r1", key="bob")
    assert models.find(None, bob) == models.find("mixed", bob) == (b, None)
    assert models.find("own", bob) is None
    assert [name for name, *_ in models.names(bob)] == ["b", "mixed"]
    for any_name in (False, True):
        api = await serve_api(any_model_name=any_name)
        api.service.catalogue, api.service.generator = models, a.generator
        for body in ({"prompt": "x"}, {"prompt": "x", "model": "a"}):
            answer = await api.post("/v1/completions", body)
            if "model" in body and not any_name:
                assert (answer.status, answer.error()["code"]) == (404, "model_not_found")
            else:
                assert answer.json()["choices"][0]["text"] == "second"
        api.service.catalogue = Catalogue([a], {})
        answer = await api.post("/v1/completions", {"prompt": "x"})
        assert (answer.status, answer.error()["message"]) == (
            404,
            "This key may ask no model here.",
        )
    assert a.generator.endpoint.requests == []


async def test_another_model_answers_where_one_has_no_host_or_no_room() -> None:
    a, peer = served("a", fallback=("b", "c"))
    b, _ = served("b", has_host=False)
    c, _ = served("c", keys=frozenset({"alice"}))
    models = Catalogue([a, b, c], {})
    alice, bob = client(key="alice"), client(key="bob")
    assert models.choose(a, alice) is a
    peer.enter(ReplicaState.STARTING)
    assert models.choose(a, alice) is c
    assert models.choose(a, bob) is a  # nobody else answers, and so it waits for a host
    full, _ = served("full", fallback=("a",), max_requests=0)
    others = Catalogue([full, a, b, c], {})
    assert others.choose(full, bob) is full
    peer.enter(ReplicaState.READY)
    assert others.choose(full, bob) is a


@given(
    st.dictionaries(st.text(min_size=1), st.floats(1e-3, 1e3), min_size=1, max_size=5),
    st.text(),
)
def test_a_share_depends_on_the_key_alone(shares: dict[str, float], key: str) -> None:
    assert share_of(shares, key) in shares
    assert share_of(shares, key) == share_of(dict(shares), key)


def test_shares_are_kept() -> None:
    counts = Counter(share_of({"a": 0.9, "b": 0.1}, f"r{number}") for number in range(2_000))
    assert 120 < counts["b"] < 280


async def test_a_server_answers_with_the_model_that_is_named(serve_api) -> None:
    api = await serve_api()
    a, _ = served("a", endpoint=ScriptedEndpoint("first"), least_priority=5)
    b, _ = served("b", endpoint=ScriptedEndpoint("second"), request_timeout_s=7.0)
    gone, _ = served("gone", has_host=False)
    api.service.catalogue = Catalogue([a, b, gone], {})
    api.service.generator = a.generator
    listed = (await api.get("/v1/models")).json()["data"]
    assert [(model["id"], model["root"]) for model in listed] == [
        ("a", "a"),
        ("b", "b"),
        ("gone", "gone"),
    ]
    assert [model["max_model_len"] for model in listed][2] is None
    answer = (await api.complete(model="b", max_tokens=20)).json()
    assert (answer["model"], answer["choices"][0]["text"]) == ("b", "second")
    asked = b.generator.endpoint.requests[-1]
    assert asked.timeout_s is not None
    assert 0 < asked.timeout_s <= 7.0
    refused = await api.complete(model="a", priority=4)
    assert (refused.status, refused.error()["param"]) == (400, "priority")
    assert (await api.complete(model="a", priority=5, max_tokens=20)).status == 200
    missing = await api.complete(model="c")
    assert (missing.status, missing.error()["code"]) == (404, "model_not_found")
    waiting = await api.complete(model="gone")
    assert (waiting.status, waiting.error()["message"]) == (
        503,
        "The model 'gone' has no host yet.",
    )
    counted = (await api.post("/tokenize", {"model": "b", "prompt": "x"})).json()
    assert counted["count"] == 1
