"""The description of the routes."""

from __future__ import annotations

from typing import Any

from pagoda.api.keys import ApiKeys
from pagoda.api.openapi import describe
from pagoda.api.routes import OPEN_PATHS, ROUTES


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
    spec = describe(ROUTES, OPEN_PATHS)
    for reference in references(spec):
        assert reference.removeprefix("#/components/schemas/") in spec["components"]["schemas"]


def test_bodies_are_those_of_the_types() -> None:
    spec = describe(ROUTES, OPEN_PATHS)
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
    spec = describe(ROUTES, OPEN_PATHS)
    tags = {one["tags"][0] for methods in spec["paths"].values() for one in methods.values()}
    assert tags == {"OpenAI", "Anthropic", "Ollama", "Server"}
