# SPDX-License-Identifier: Apache-2.0
"""Requests of many kinds from clients that come, ask, and sometimes leave early.

`python -m benchmarks.chaos.mixed_load URL [--clients N] [--rate R] [--longer L] [--seed S]` runs until standard
input ends. For each line on it, it prints a line of JSON: what was answered since the line before.

Whatever a client chooses (ids, salts, schemas, names, paths) differs from request to request, so that a table that
the server keeps by such a name grows.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import msgspec

from benchmarks.chaos.processes import reporting
from pagoda.concurrency.event_loop import run

_LEAVING_SHARE = 0.15
"""Share of clients that leave in the middle of their answer."""
_TIMEOUT_S = 120.0
_LENGTHS = ("max_tokens", "max_output_tokens", "max_new_tokens", "num_predict", "n_predict")
"""Fields that bound the tokens of an answer."""


class Ask(NamedTuple):
    """A request."""

    path: str
    body: dict[str, Any] | None
    """None: a GET."""
    status: int = 200
    """The status that the answer must have."""


class Counts(msgspec.Struct, frozen=True):
    """Answers since the last count."""

    answered: int
    left: int
    """Answers whose client left."""
    refused: int
    """Answers with status 429."""
    errors: tuple[str, ...]
    """Sentences about at most 20 failures."""


def asks(chance: random.Random, longer: int) -> Iterator[Ask]:
    """Endless requests, in random order. Answers may be `longer` times as long as they are written here."""
    while True:
        ask = chance.choices(_KINDS, _WEIGHTS)[0](chance)
        yield ask if ask.body is None else ask._replace(body=_lengthened(ask.body, longer))


def _lengthened(body: dict[str, Any], longer: int) -> dict[str, Any]:
    fields = dict(body)
    for name, value in body.items():
        if name in _LENGTHS:
            fields[name] = value * longer
        elif name in ("options", "sampling_params"):
            fields[name] = _lengthened(value, longer)
    return fields


def _text(chance: random.Random, words: int) -> str:
    """Random sums; every second text begins like many others."""
    shared = "Answer each line.\n" * (words // 8) if chance.random() < 0.5 else ""
    return shared + " ".join(
        f"{chance.randrange(100)} + {chance.randrange(100)} =" for _ in range(words // 3 + 1)
    )


def _messages(chance: random.Random, words: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": _text(chance, words)}]


def _sampling(chance: random.Random) -> dict[str, Any]:
    greedy = {"temperature": 0.0}
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": chance.randrange(2**31)}
    return {
        **(greedy if chance.random() < 0.5 else sampled),
        "max_tokens": chance.randrange(8, 120),
    }


def _completion(chance: random.Random) -> Ask:
    extra: dict[str, Any] = chance.choice(
        (
            {"n": 4},
            {"stop": [f"{chance.randrange(1000)}"]},
            {"logprobs": 3, "echo": True},
            {"cache_salt": f"salt-{chance.random()}"},
            {"user": f"user-{chance.random()}"},
            {"ignore_eos": True},
        )
    )
    return Ask(
        "/v1/completions",
        {
            "prompt": _text(chance, 12),
            "stream": chance.random() < 0.7,
            **_sampling(chance),
            **extra,
        },
    )


def _long_prompt(chance: random.Random) -> Ask:
    body = {"prompt": [chance.randrange(1, 500) for _ in range(chance.randrange(300, 1500))]}
    return Ask("/v1/completions", {**body, "max_tokens": 16, "stream": True})


def _chat(chance: random.Random) -> Ask:
    body = {"messages": _messages(chance, 12), "stream": True, **_sampling(chance)}
    return Ask("/v1/chat/completions", body)


def _tool(chance: random.Random) -> Ask:
    name = f"f{chance.randrange(10**6)}"
    properties = {f"p{chance.randrange(10**6)}": {"enum": ["a", "b"]}}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "parameters": parameters}
    return Ask(
        "/v1/chat/completions",
        {
            "messages": _messages(chance, 3),
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "max_tokens": 100,
            "stream": chance.random() < 0.5,
        },
    )


def _schema(chance: random.Random) -> Ask:
    properties = {f"k{chance.randrange(10**6)}": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    inner = {"name": f"s{chance.randrange(10**6)}", "strict": True, "schema": schema}
    form = {"type": "json_schema", "json_schema": inner}
    body = {"messages": _messages(chance, 3), "response_format": form, "max_tokens": 60}
    return Ask("/v1/chat/completions", {**body, "stream": chance.random() < 0.5})


def _anthropic(chance: random.Random) -> Ask:
    body = {"model": "any", "messages": _messages(chance, 9), "max_tokens": 40}
    return Ask("/v1/messages", {**body, "stream": chance.random() < 0.7})


def _ollama(chance: random.Random) -> Ask:
    options = {"num_predict": 40, "seed": chance.randrange(2**31)}
    return Ask("/api/chat", {"model": "any", "messages": _messages(chance, 9), "options": options})


def _sglang(chance: random.Random) -> Ask:
    sampling = {"max_new_tokens": 40, "temperature": 0.5}
    return Ask("/generate", {"text": _text(chance, 9), "sampling_params": sampling, "stream": True})


def _llamacpp(chance: random.Random) -> Ask:
    return Ask("/completion", {"prompt": _text(chance, 9), "n_predict": 40, "stream": True})


def _response(chance: random.Random) -> Ask:
    body = {"model": "any", "input": _text(chance, 9), "max_output_tokens": 30}
    return Ask(
        "/v1/responses", {**body, "store": chance.random() < 0.7, "stream": chance.random() < 0.5}
    )


def _look(chance: random.Random) -> Ask:
    path = chance.choice(("/metrics", "/health", "/v1/models", "/v1/load", "/v1/requests"))
    return Ask(path, None)


def _wrong(chance: random.Random) -> Ask:
    number = chance.randrange(10**9)
    return chance.choice(
        (
            Ask(f"/no/such/{number}", None, 404),
            Ask("/v1/completions", {"prompt": "x", f"field{number}": 1}, 400),
            Ask("/v1/completions", {"prompt": "x", "max_tokens": -number}, 400),
            Ask(f"/v1/responses/resp_{number}", None, 404),
        )
    )


def _tokenize(chance: random.Random) -> Ask:
    return Ask("/tokenize", {"prompt": _text(chance, 60)})


_KINDS: Sequence[Callable[[random.Random], Ask]] = (
    *(_completion, _long_prompt, _chat, _tool, _schema, _anthropic, _ollama, _sglang, _llamacpp),
    *(_response, _look, _wrong, _tokenize),
)
_WEIGHTS = (6, 2, 6, 1, 1, 2, 2, 2, 2, 2, 2, 2, 1)


@dataclass
class _Book:
    answered: int = 0
    left: int = 0
    refused: int = 0
    errors: list[str] = field(default_factory=list)

    def take(self) -> Counts:
        errors = tuple(self.errors[:20])
        counts = Counts(self.answered, self.left, self.refused, errors)
        self.answered = self.left = self.refused = 0
        self.errors = []
        return counts


async def _client(url: str, chance: random.Random, rate: float, longer: int, book: _Book) -> None:
    """A client that asks `rate` times a second, over some connections of its own."""
    requests = asks(chance, longer)
    while True:
        limit = aiohttp.ClientTimeout(_TIMEOUT_S)
        # A name of this machine among 2^16 others, so that addresses differ.
        local = f"127.1.{chance.randrange(256)}.{chance.randrange(1, 255)}"
        connector = aiohttp.TCPConnector(local_addr=(local, 0))
        async with aiohttp.ClientSession(url, timeout=limit, connector=connector) as session:
            for _ in range(20):
                await asyncio.sleep(chance.expovariate(rate))
                ask = next(requests)
                try:
                    await _send(session, ask, chance, book)
                except (aiohttp.ClientError, TimeoutError) as error:
                    book.errors.append(f"{ask.path}: {error!r}")


async def _send(
    session: aiohttp.ClientSession, ask: Ask, chance: random.Random, book: _Book
) -> None:
    headers = {"X-Request-Id": f"{chance.getrandbits(64):x}"}
    leaves_after = chance.randrange(1, 8) if chance.random() < _LEAVING_SHARE else None
    method = "GET" if ask.body is None else "POST"
    async with session.request(method, ask.path, json=ask.body, headers=headers) as answer:
        if answer.status == 429:
            book.refused += 1
            return
        if answer.status != ask.status:
            book.errors.append(f"{ask.path}: {answer.status} {(await answer.text())[:200]}")
            return
        text = b""
        async for piece in answer.content.iter_any():
            text = piece
            if b'"error":{' in piece and ask.status == 200:
                book.errors.append(f"{ask.path}: {piece[:200]!r}")
            if leaves_after is not None:
                leaves_after -= 1
                if leaves_after == 0:
                    book.left += 1
                    answer.close()
                    return
        if not text:
            book.errors.append(f"{ask.path}: nothing in its answer")
    book.answered += 1


async def _run(url: str, clients: int, rate: float, longer: int, seed: int) -> None:
    book = _Book()
    chances = [random.Random(f"{seed} {index}") for index in range(clients)]
    each = rate / clients
    tasks = [asyncio.create_task(_client(url, one, each, longer, book)) for one in chances]
    while await asyncio.to_thread(sys.stdin.readline):
        broken = [task.exception() for task in tasks if task.done()]
        book.errors += [f"a client broke: {error!r}" for error in broken]
        sys.stdout.write(msgspec.json.encode(book.take()).decode() + "\n")
        sys.stdout.flush()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def mixed_load(
    url: str, clients: int, rate: float, longer: int = 1, seed: int = 0
) -> AbstractContextManager[Callable[[], Counts]]:
    """`clients` that ask `rate` times a second together, in a process of their own, until the context ends. The
    function counts the answers since its last call."""
    numbers = {"--clients": clients, "--rate": rate, "--longer": longer, "--seed": seed}
    arguments = [f"{name}={number}" for name, number in numbers.items()]
    return reporting("benchmarks.chaos.mixed_load", [url, *arguments], Counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rate", type=float, default=20.0, help="requests in a second")
    parser.add_argument(
        "--longer", type=int, default=1, help="answers may be so many times as long"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run(_run(options.url, options.clients, options.rate, options.longer, options.seed))


if __name__ == "__main__":
    main()
