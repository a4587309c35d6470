# SPDX-License-Identifier: Apache-2.0
"""JSON schemas like those of applications, of rising size, from a seed; and whether answers of a server validate.

`python -m benchmarks.json_schemas --url http://127.0.0.1:8000 --count 500`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import aiohttp
import jsonschema

_WORDS = ("name", "id", "status", "items", "price", "tags", "owner", "city", "note", "kind", "unit")
_FORMATS = ("date", "date-time", "email", "uuid", "ipv4", "time")
_PATTERNS = (
    r"^[A-Z]{2}\d{3}$",
    r"^\d{4}-\d{2}$",
    r"^(on|off)$",
    r"^[a-z]+(-[a-z]+)?$",
    r"^#[0-9a-f]{6}$",
)


def make_schema(number: int, seed: int = 7) -> dict[str, Any]:
    """Schema `number` of a series whose sizes rise."""
    rng = random.Random(seed * 1_000_003 + number)
    names = [f"shape_{i}" for i in range(rng.randint(0, 3))]
    schema = _object(rng, 2 + number // 40, 1 + number % 3, names)
    if names:
        schema["$defs"] = {name: _object(rng, 2, 1, []) for name in names}
    return schema


def _object(rng: random.Random, size: int, depth: int, names: list[str]) -> dict[str, Any]:
    properties = {
        f"{rng.choice(_WORDS)}_{i}": _value(rng, size, depth, names) for i in range(max(1, size))
    }
    required = [name for name in properties if rng.random() < 0.7]
    return {
        "type": "object",
        "title": "A thing",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _value(rng: random.Random, size: int, depth: int, names: list[str]) -> dict[str, Any]:
    if depth > 0 and rng.random() < 0.4:
        kind = rng.choice(["object", "array", "anyOf", "oneOf", "tuple"])
        inner = [_value(rng, size // 2, depth - 1, names) for _ in range(2)]
        match kind:
            case "object":
                return _object(rng, size // 2, depth - 1, names)
            case "array":
                return {
                    "type": "array",
                    "items": inner[0],
                    "minItems": rng.randint(0, 2),
                    "maxItems": 3,
                }
            case "anyOf":
                return {"anyOf": [*inner, {"type": "null"}]}
            case "oneOf":
                return {
                    "oneOf": [{"type": "integer", "minimum": 0}, {"type": "string", "maxLength": 6}]
                }
        return {"type": "array", "prefixItems": inner, "items": False, "minItems": 2}
    if names and rng.random() < 0.3:
        return {"$ref": f"#/$defs/{rng.choice(names)}"}
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(1, 20), "description": "free text"},
            {"type": "string", "pattern": rng.choice(_PATTERNS)},
            {"type": "string", "format": rng.choice(_FORMATS)},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(1, 10**4)},
            {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
            {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
            {"type": "boolean", "default": False},
            {"enum": ["red", "green", 3, None]},
            {"const": "fixed"},
        ]
    )


def check(schema: dict[str, Any], text: str) -> None:
    """Raises ValueError, of which both kinds of errors are: the text is not JSON, or not of the schema."""
    value = json.loads(text)
    try:
        jsonschema.Draft202012Validator(schema).validate(value)
    except jsonschema.ValidationError as error:
        raise ValueError(error.message) from error


async def _answer(
    session: aiohttp.ClientSession,
    url: str,
    number: int,
    temperature: float,
    gate: asyncio.Semaphore,
) -> str:
    schema = make_schema(number)
    named = {"name": "thing", "strict": True, "schema": schema}
    body = {
        "prompt": "Answer in JSON:",
        "max_tokens": 400,
        "seed": number,
        "temperature": temperature,
        "response_format": {"type": "json_schema", "json_schema": named},
    }
    async with gate, session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
    if response.status != 200:
        return f"refused with {response.status}: {answer['error']['message'][:160]}"
    choice = answer["choices"][0]
    if choice["finish_reason"] != "stop":
        return "cut"
    try:
        check(schema, choice["text"])
    except ValueError as error:
        return f"invalid: {str(error)[:160]}"
    return "valid"


async def answers(url: str, count: int, temperature: float, concurrency: int) -> Counter[str]:
    """Asks for an answer to each of the first schemas, and counts what became of them."""
    gate = asyncio.Semaphore(concurrency)
    async with aiohttp.ClientSession() as session:
        works = (_answer(session, url, n, temperature, gate) for n in range(count))
        return Counter(await asyncio.gather(*works))


async def measure(url: str, count: int, temperatures: list[float], concurrency: int) -> None:
    for temperature in temperatures:
        began = time.monotonic()
        found = await answers(url, count, temperature, concurrency)
        print(f"temperature {temperature:g}: {time.monotonic() - began:.1f} s", dict(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0, 2.0])
    parser.add_argument("--concurrency", type=int, default=16)
    args = parser.parse_args()
    asyncio.run(measure(args.url, args.count, args.temperatures, args.concurrency))


if __name__ == "__main__":
    main()
