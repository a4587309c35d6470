# SPDX-License-Identifier: Apache-2.0
"""Cost of constrained answers: `python -m benchmarks.constrained [cost] [compile] [--model MODEL] [--rounds N]`.

`cost` asks one server for free and for constrained answers in turn, with compiled grammars. Ratios are
taken within a round, so that what else the machine does falls on all alike; medians count, quartiles are shown.
`compile` times the way from the text of a JSON schema to a place in its grammar, each time of a new schema: in
the frontend (`json_grammar`), and in the thread beside the engine's loop.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from benchmarks.figure import Figure
from benchmarks.json_schemas import make_schema
from pagoda.checkpoints.resolve import load_model_config, resolve_model
from pagoda.cli import output
from pagoda.cli.server_process import server_process
from pagoda.engine.structured_output.constraint import Constraint
from pagoda.engine.structured_output.grammars import Grammars
from pagoda.engine.structured_output.vocabulary import TokenTextsOrder, load_token_texts
from pagoda.messages.frontend import GenerateRequest, Grammar, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.text.grammars.constraints import json_grammar

_STREAMS = 16
_MAX_TOKENS = 128
_FREE = "free"
_ITEM = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
_KINDS: dict[str, dict[str, Any]] = {
    _FREE: {},
    "any text": {"regex": r"(?s:.){1,100000}"},
    "array of objects": {"json": {"type": "array", "items": _ITEM, "minItems": 10_000}},
}
"""Constraints of answers; none of them ends an answer before `_MAX_TOKENS`."""
_SIZES = (2_000, 10_000, 50_000)
"""Least bytes of the schemas that are compiled."""
_LIMIT_BYTES = 10_000
"""Bytes of the schema that must be compiled in 50 ms."""


def main() -> None:
    """Measures what is named, by default both, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(_MEASUREMENTS))
    parser.add_argument("--model", default=None, help="by default the embedded model")
    parser.add_argument("--rounds", type=int, default=9, help="of each measurement (9)")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(_MEASUREMENTS))
    if unknown:
        parser.error(f"no measurement {unknown[0]}; there are {', '.join(_MEASUREMENTS)}")
    if arguments.rounds < 2:
        parser.error("--rounds must be at least 2, of which there are quartiles")
    figures: list[Figure] = []
    for name in arguments.names or _MEASUREMENTS:
        output.stderr().print(f"measuring {name} ...")
        figures += _MEASUREMENTS[name](arguments.model, arguments.rounds)
    rows = [(f.what, f.measured, f.target, f.command) for f in figures]
    output.stdout().print(output.table("", ("what", "measured", "target", "command"), rows))


def measure_cost(model: str | None, rounds: int) -> list[Figure]:
    """Tokens a second of constrained answers against free ones."""
    name = [] if model is None else [model]
    with server_process([*name, "--log-level", "warning"]) as server:
        rates = asyncio.run(_take_turns(server.base_url, rounds))
    what = f"{model or 'pagoda-tiny'}, {_STREAMS} streams"
    command = "python -m benchmarks.constrained cost"
    plain = statistics.median(rates[_FREE])
    figures = [Figure(f"{what}, {_FREE}", f"{plain:,.0f} tokens/s", "–", command)]
    for kind in list(_KINDS)[1:]:
        ratios = [held / free for held, free in zip(rates[kind], rates[_FREE], strict=True)]
        figures.append(Figure(f"{what}, {kind}", _spread(ratios, "{:.3f}"), "≥ 0.97", command))
    return figures


async def _take_turns(url: str, rounds: int) -> dict[str, list[float]]:
    """Tokens a second of each kind in each round; in every round another one is first."""
    kinds = list(_KINDS)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        for kind in kinds:  # compiles the grammar
            await _rate(session, kind)
        for number in range(rounds):
            first = number % len(kinds)
            for kind in kinds[first:] + kinds[:first]:
                rates[kind].append(await _rate(session, kind))
    return rates


async def _rate(session: aiohttp.ClientSession, kind: str) -> float:
    began = time.perf_counter()
    counts = await asyncio.gather(*(_answer(session, kind, seed) for seed in range(_STREAMS)))
    return sum(counts) / (time.perf_counter() - began)


async def _answer(session: aiohttp.ClientSession, kind: str, seed: int) -> int:
    """Asks for one answer; returns its number of tokens."""
    body = {
        "prompt": "Some text about many things, at length:",
        "max_tokens": _MAX_TOKENS,
        "temperature": 1.0,
        "seed": seed,
        "ignore_eos": True,
        "structured_outputs": _KINDS[kind] or None,
    }
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        usage = (await response.json())["usage"]
    return int(usage["completion_tokens"])


def measure_compiling(model: str | None, rounds: int) -> list[Figure]:
    """Milliseconds from the text of a schema to a place in its grammar."""
    files = resolve_model(model).model
    texts = load_token_texts(TokenTextsOrder(files, "auto", simulated=False))
    vocab_size = load_model_config(files, "auto").vocab_size
    command = "python -m benchmarks.constrained compile"
    figures = []
    # The work of the thread is done in this one, where it is timed.
    grammars = Grammars(lambda: texts, vocab_size, lambda work: work())
    _place(grammars, json_grammar({}, "schema"))  # reads the vocabulary
    for size in _SIZES:
        front, engine = [], []
        for number in range(rounds):
            schema = _schema_of(size, number)
            began = time.perf_counter()
            grammar = json_grammar(schema, "schema")
            read = time.perf_counter()
            _place(grammars, grammar)
            front.append((read - began) * 1e3)
            engine.append((time.perf_counter() - read) * 1e3)
        what = f"{model or 'pagoda-tiny'}, JSON schema of {len(grammar.text):,} bytes"
        target = "≤ 50 ms" if size == _LIMIT_BYTES else "–"
        figures += [
            Figure(f"{what}: frontend", _spread(front, "{:.1f} ms"), "–", command),
            Figure(f"{what}: compile", _spread(engine, "{:.1f} ms"), target, command),
        ]
    return figures


def _schema_of(size: int, number: int) -> dict[str, Any]:
    """A schema whose text has at least so many bytes; another one for each number."""
    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {f"shape_{i}": {"type": "string"} for i in range(3)}
    schema = {"type": "object", "properties": properties, "$defs": definitions}
    while len(json_grammar(schema, "schema").text) < size:
        part = make_schema(100 + len(properties), seed=number)
        definitions |= part.pop("$defs", {})
        properties[f"part_{len(properties)}"] = part
    return schema


def _place(grammars: Grammars, grammar: Grammar) -> Constraint:
    """The place in front of the first token. Raises ValueError: the grammar is refused."""
    request = GenerateRequest(
        request_id="compile", prompt_token_ids=[0], work=Work(SamplingParams()), grammar=grammar
    )
    place = grammars.take(request, grammar)
    if place is None:
        [(_, place)] = grammars.drain()
    if not isinstance(place, Constraint):
        raise ValueError(place)
    return place


def _spread(values: Sequence[float], form: str) -> str:
    """The median, and the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{form.format(middle)} ({form.format(low)} to {form.format(high)})"


_MEASUREMENTS: dict[str, Callable[[str | None, int], list[Figure]]] = {
    "cost": measure_cost,
    "compile": measure_compiling,
}


if __name__ == "__main__":
    main()
