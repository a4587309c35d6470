# SPDX-License-Identifier: Apache-2.0
"""The description of the routes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from template_texts import QWEN

from pagoda.api.auth.keys import ApiKeys
from pagoda.api.openapi import describe
from pagoda.api.routes import ROUTES


def references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [found for item in value for found in references(item)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    return own + [found for item in value.values() for found in references(item)]


async def test_it_is_open_and_complete(serve_api) -> None:
    api = await serve_api(api_keys=ApiKeys(["secret"]), loading=True)
    spec = (await api.get("/openapi.json")).json()
    assert spec["openapi"] == "3.1.0"
    for path, methods in ROUTES.items():
        shown = spec["paths"].get(path.replace("*", "{id}"), {})
        assert shown.keys() == {m.lower() for m, route in methods.items() if route.is_offered}
    ids = [one["operationId"] for methods in spec["paths"].values() for one in methods.values()]
    assert len(set(ids)) == len(ids)
    assert (await api.get("/docs")).headers["Content-Type"].startswith("text/html")


def test_everything_that_is_referred_to_is_there() -> None:
    spec = describe(ROUTES)
    for reference in references(spec):
        assert reference.removeprefix("#/components/schemas/") in spec["components"]["schemas"]


def test_bodies_are_those_of_the_types() -> None:
    spec = describe(ROUTES)
    body = spec["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    schema = spec["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]
    assert "prompt" in schema["required"]
    names = list(schema["properties"])
    assert names[:2] == ["prompt", "echo"]
    assert schema["properties"][names[-1]]["description"].startswith("Not supported")
    assert schema["properties"]["mirostat"]["enum"] == [None, 0]
    assert schema["additionalProperties"] is False
    assert {"temperature", "stream", "top_p"} <= schema["properties"].keys()


def test_every_route_is_of_an_api_that_the_page_knows() -> None:
    spec = describe(ROUTES)
    tags = {one["tags"][0] for methods in spec["paths"].values() for one in methods.values()}
    assert tags == {"OpenAI", "Anthropic", "Ollama", "Server"}


USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "logprobs": True, "tools": [TOOL]},
    "/v1/completions": {"prompt": "hi", "logprobs": 1},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [1, 2]},
    "/v1/models": {},
    "/v1/models/*": {},
}


@pytest.mark.parametrize("path", BODIES)
async def test_answers_are_of_their_types(serve_api, path: str) -> None:
    api = await serve_api(CALL, text=QWEN)
    method, route = next(iter(ROUTES[path].items()))
    own = path.replace("*", "tiny")
    answer = await (api.get(own) if method == "GET" else api.post(own, BODIES[path]))
    assert answer.status == 200
    whole = answer.json()
    typed = msgspec.to_builtins(msgspec.convert(whole, route.answer))
    assert _known(whole, typed) == _known(typed, whole)


def _known(value: Any, typed: Any) -> Any:
    """The part of a value whose fields its type has."""
    if isinstance(value, list):
        return [_known(item, one) for item, one in zip(value, typed, strict=True)]
    if not isinstance(value, dict):
        return value
    return {name: _known(value[name], typed[name]) for name in value if name in typed}


def test_answers_of_all_typed_routes_are_checked() -> None:
    checked = {next(iter(ROUTES[path].values())).answer for path in BODIES}
    routes = [route for methods in ROUTES.values() for route in methods.values()]
    assert {route.answer for route in routes if route.answer is not None} == checked
