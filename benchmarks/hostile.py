"""Hostile requests beside eight plain streams: the time of each answer, and the longest pause of the streams.

`python -m benchmarks.hostile [--embedded] [NAME...]`

Another process sends the requests, one after the other. A pause counts for a request if it overlaps the time
from the request to a tenth of a second behind its answer. The first row has the pauses without a request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import aiohttp

from pagoda.cli import output
from pagoda.cli.server_process import server_process
from pagoda.frontend.event_loop import run

_SIMULATED = ["--executor", "sim", "--sim-base-ms", "5", "--max-num-seqs", "64"]
_STREAMS = 8
_TAIL_S = 0.1
_BODY_BYTES = 8 * 2**20 - 4096
_MESSAGES = [{"role": "user", "content": "hi"}]
_PLAIN = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}


class Case(NamedTuple):
    """A request."""

    name: str
    path: str
    body: bytes


class Pause(NamedTuple):
    """Time between two events of a stream, on the clock `time.monotonic`."""

    began: float
    ended: float


def cases() -> Iterator[Case]:
    """Schemas that explode, dear patterns and grammars, tools of one name, and bodies of many values."""
    for name, schema in _schemas():
        yield _chat(f"schema: {name}", response_format=_response_format(schema))
        tool = {"name": "f", "strict": True, "parameters": schema}
        tools = [{"type": "function", "function": tool}]
        yield _chat(f"tool: {name}", tools=tools, tool_choice="required")
    for name, pattern in _PATTERNS.items():
        yield _completion(f"regex: {name}", structured_outputs={"regex": pattern})
    for name, grammar in _GRAMMARS.items():
        yield _completion(f"grammar: {name}", structured_outputs={"grammar": grammar})
    choices = [f"{i:025d}" for i in range(4000)]
    yield _completion("4,000 choices", structured_outputs={"choice": choices})
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    yield _chat("tools of one name", tools=[tool, tool], tool_choice="required")
    for part in ("[]", "{}", '""', '{"a":1}', '"x"', "1"):
        number = min(_BODY_BYTES // (len(part) + 1), 3_000_000)
        yield _large(f"{number:,} times {part}", ",".join([part] * number))
    names = ",".join(f'"{i}":1' for i in range(600_000))
    yield _large("600,000 names", "{" + names + "}")
    yield _large("8 MB of quotes", '"' + '\\"' * (_BODY_BYTES // 2) + '"')
    yield _completion("8 MB of text", prompt="a " * (_BODY_BYTES // 2))


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _schemas() -> Iterator[tuple[str, Any]]:
    text = {"type": "string"}
    links = {f"a{i}": _object(**dict.fromkeys("xy", _ref(i + 1))) for i in range(200)}
    yield "definitions in a chain", {**_ref(0), "$defs": links | {"a200": text}}
    yield "itself", {"$ref": "#"}
    yield "a million values", {"enum": list(range(1_000_000))}
    yield "9,000 values", _object(a={"enum": [f"v{i}" for i in range(9000)]})
    yield "a long constant", _object(a={"enum": ["x" * 100_000, "y"]})
    yield "2,000 optional", {"type": "object", "properties": {f"p{i}": text for i in range(2000)}}
    yield "300 optional", {"type": "object", "properties": {f"p{i}": text for i in range(300)}}
    yield (
        "bounds of 500 numbers",
        _object(
            **{
                f"k{i}": {"type": "number", "minimum": i - 1.5, "maximum": i + 9.25}
                for i in range(500)
            }
        ),
    )
    parts = [{"anyOf": [_object(**{f"p{i}_{j}": text}) for j in range(6)]} for i in range(8)]
    yield "choices multiplied", {"allOf": parts}
    yield (
        "1,000 patterns",
        _object(
            **{f"k{i}": {**text, "pattern": f"^[a-z]{{1,50}}{i}.*(x|y)+z$"} for i in range(1000)}
        ),
    )
    yield (
        "wide patterns",
        _object(
            **{
                f"k{i}": {**text, "pattern": "(?i)^[\\p{L}\\u0100-\\uffff]{1,200}$"}
                for i in range(8)
            }
        ),
    )


_PATTERNS = {
    "catastrophic": "(a+)+b",
    "repeated a billion times": "(x|y)a{1000000000}",
    "squared": "(.{1,1000}){1,1000}",
    "exponential": "(a|b)*a(a|b){300}",
    "all of twenty": "&".join(["(.*a.{30})"] * 20),
    "nested": "(" * 6000 + ")" * 6000,
    "open": "(",
}
_GRAMMARS = {
    "ambiguous": 'start: s\ns: s s | "a" | ""',
    "ambiguous in three": 'start: x\nx: x x x | "a"',
    "repeated twice": 'start: ("a"{1,100000}){1,100000}',
    "itself": "start: start",
    "a chain": "start: r0\n"
    + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(2000))
    + '\nr2000: "a"',
    "an error": 'start: "a\nb:',
}


def _ref(index: int) -> dict[str, str]:
    return {"$ref": f"#/$defs/a{index}"}


def _response_format(schema: Any) -> dict[str, Any]:
    inner = {"name": "x", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": inner}


def _chat(name: str, **fields: Any) -> Case:
    body = {"messages": _MESSAGES, "max_tokens": 60, **fields}
    return Case(name, "/v1/chat/completions", json.dumps(body).encode())


def _completion(name: str, **fields: Any) -> Case:
    body = {"prompt": "hi", "max_tokens": 60, **fields}
    return Case(name, "/v1/completions", json.dumps(body).encode())


def _large(name: str, values: str) -> Case:
    body = _chat(name, response_format=_response_format({"enum": ["HERE"]})).body
    return Case(name, "/v1/chat/completions", body.replace(b'"HERE"', values.encode()))


async def _send(url: str, names: list[str]) -> None:
    """Sends the cases, and prints a line of JSON for each."""
    limit = aiohttp.ClientTimeout(30)
    async with aiohttp.ClientSession(url, timeout=limit) as session:
        for case in [Case("nothing", "", b""), *cases()]:
            if names and case.name != "nothing" and not any(name in case.name for name in names):
                continue
            await asyncio.sleep(2 * _TAIL_S)
            began, status, error = time.monotonic(), 0, ""
            if case.path:
                headers = {"Content-Type": "application/json"}
                async with session.post(case.path, data=case.body, headers=headers) as answer:
                    status, text = answer.status, await answer.text()
                    error = "" if status == 200 else json.loads(text)["error"]["message"]
            ended = time.monotonic()
            print(json.dumps((case.name, began, ended, status, error[:60])), flush=True)


async def _watch(session: aiohttp.ClientSession, pauses: list[Pause]) -> None:
    """Keeps a plain stream going, and notes its pauses of more than 2 ms."""
    while True:
        async with session.post("/v1/completions", json=_PLAIN) as answer:
            last = 0.0
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    if last and now - last > 0.002:
                        pauses.append(Pause(last, now))
                    last = now


async def _measure(url: str, names: list[str]) -> list[tuple[str, ...]]:
    pauses: list[Pause] = []
    rows: list[tuple[str, ...]] = []
    async with aiohttp.ClientSession(url) as session, asyncio.TaskGroup() as group:
        tasks = [group.create_task(_watch(session, pauses)) for _ in range(_STREAMS)]
        await asyncio.sleep(1)
        command = [sys.executable, "-m", "benchmarks.hostile", "--send", url, *names]
        pipe = asyncio.subprocess.PIPE
        sender = await asyncio.create_subprocess_exec(*command, stdout=pipe)
        if sender.stdout is None:
            raise RuntimeError("The sender has no output.")
        async for line in sender.stdout:
            name, began, ended, status, error = json.loads(line)
            await asyncio.sleep(_TAIL_S)
            longest = max(
                (
                    p.ended - p.began
                    for p in pauses
                    if p.ended > began and p.began < ended + _TAIL_S
                ),
                default=0.0,
            )
            pauses.clear()
            took = f"{(ended - began) * 1e3:.0f} ms"
            rows.append((name, str(status or ""), took, f"{longest * 1e3:.0f} ms", error))
        await sender.wait()
        for task in tasks:
            task.cancel()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names of requests")
    parser.add_argument(
        "--embedded", action="store_true", help="the embedded model, not a simulator"
    )
    parser.add_argument(
        "--send", metavar="URL", help="only send the requests, and print their times"
    )
    options = parser.parse_args()
    if options.send is not None:
        with contextlib.suppress(BrokenPipeError):
            run(_send(options.send, options.names))
        return
    with server_process([] if options.embedded else _SIMULATED) as server:
        rows = run(_measure(server.base_url, options.names))
    columns = ("request", "status", "answer after", "longest pause", "error")
    output.stdout().print(output.table("", columns, rows))


if __name__ == "__main__":
    main()
