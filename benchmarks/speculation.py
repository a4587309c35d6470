# SPDX-License-Identifier: Apache-2.0
"""Speculation against none: `python -m benchmarks.speculation [--model smollm2] [--streams 1 4] [FLAGS OF SERVE]`.

One server is asked in turn with `speculation: off` and without, so that what else the machine does falls on both;
the ratio of each turn's tokens a second is taken, medians count. Each stream asks again when it has an answer, and
a turn counts while all of them do. `text` answers from texts (summaries, extraction, edits of code): what is said
has mostly been read. `chat` are free questions.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from pagoda.cli import output
from pagoda.cli.server_process import server_process

_ROOT = Path(__file__).parents[1]
_TASKS = (
    "Summarise the following text in a few sentences, with its own words.",
    "List, word for word, the sentences of the following text that say what must not be done.",
    "Repeat the following text and replace the word 'request' by 'job'.",
)
_CODE_TASKS = (
    "Explain the following code, and quote each function as you go.",
    "List the signatures of all functions in the following code.",
    "Rewrite the following code with 'index' renamed to 'place'. Give the whole code.",
)
_TEXTS = ("docs/tour.md", "docs/plugins.md", "README.md", "docs/architecture.md", "CONTRIBUTING.md")
_SOURCES = (
    "pagoda/engine/candidates.py",
    "pagoda/worker/sampling_state.py",
    "pagoda/engine/plans.py",
    "pagoda/ipc/clock.py",
    "benchmarks/constrained.py",
)
_ANSWERS_PER_STREAM = 3
"""Answers to each of several streams in a turn."""
_QUESTIONS = (
    "Tell me a story about a lighthouse keeper.",
    "What should I cook for four people on a rainy evening?",
    "Why is the sky blue?",
    "Write a poem about the sea in autumn.",
    "How do I learn to play the piano as an adult?",
    "What was the Hanseatic League?",
    "Give me advice for a long journey by train.",
    "Explain recursion to a child.",
    "What makes a good teacher?",
    "Describe a city a thousand years from now.",
)


def prompts_of(kind: str) -> list[str]:
    """Thirty prompts that answer from texts (`text`), or ten free ones (`chat`)."""
    if kind == "chat":
        return list(_QUESTIONS)
    pairs = [(_TEXTS, _TASKS), (_SOURCES, _CODE_TASKS)]
    return [
        f"{task}\n\n{(_ROOT / name).read_text(encoding='utf-8')[500:3000]}"
        for names, tasks in pairs
        for name in names
        for task in tasks
    ]


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kinds", nargs="+", default=["text", "chat"], choices=["text", "chat"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (128)")
    parser.add_argument("--prompts", type=int, default=30, help="at most, of each kind (30)")
    arguments, flags = parser.parse_known_args()
    rows = []
    with server_process([arguments.model, "--log-level", "warning", *flags]) as server:
        for kind in arguments.kinds:
            prompts = prompts_of(kind)
            if kind == "text":
                prompts = prompts[:: max(1, 30 // arguments.prompts)]
            for streams in arguments.streams:
                work = _compare(server.base_url, kind, prompts, streams, arguments.tokens)
                rows.append(asyncio.run(work))
    names = ("what", "off, tokens/s", "on, tokens/s", "ratio", "quartiles", "drafted", "right")
    output.stdout().print(output.table("", names, rows))


async def _compare(
    url: str, kind: str, prompts: Sequence[str], streams: int, num_tokens: int
) -> tuple[str, ...]:
    """A row of the table. Each group of prompts is answered with and without drafts, in alternating order."""
    size = streams if streams == 1 else _ANSWERS_PER_STREAM * streams
    num_groups = max(len(prompts) // size, 6)
    around = itertools.cycle(prompts)
    groups = [[next(around) for _ in range(size)] for _ in range(num_groups)]
    rates: dict[bool, list[float]] = {True: [], False: []}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        before = await _counters(session, url)
        for number, group in enumerate(groups):
            answers = {}
            for drafts in (number % 2 == 0, number % 2 == 1):
                # Salts of its own: or the answers of the other turn would be among the recent ones.
                turn = _Turn(session, url, kind, num_tokens, drafts, f"{number} {streams} {drafts}")
                rates[drafts].append(await turn.run(group, streams))
                answers[drafts] = turn.answers
            if answers[True] != answers[False]:
                raise SystemExit(f"Drafts changed an answer of {kind!r}, group {number}.")
        after = await _counters(session, url)
    ratios = [on / off for on, off in zip(rates[True], rates[False], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    drafted, right = (b - a for a, b in zip(before, after, strict=True))
    return (
        f"{kind}, {streams} streams, {len(groups)} turns",
        f"{statistics.median(rates[False]):.0f}",
        f"{statistics.median(rates[True]):.0f}",
        f"{middle:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{drafted:.0f}",
        f"{right / max(1, drafted):.0%}",
    )


class _Turn:
    """Answers to a group of prompts, so many at once: each stream asks the next one when it has an answer."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        kind: str,
        num_tokens: int,
        drafts: bool,
        salt: str,
    ) -> None:
        self._session, self._url, self._kind = session, url, kind
        self._num_tokens, self._drafts, self._salt = num_tokens, drafts, salt
        self._counts: list[tuple[float, int]] = []
        """Times at which further tokens came, and how many."""
        self.answers: dict[int, str] = {}

    async def run(self, prompts: Sequence[str], streams: int) -> float:
        """Tokens a second while all streams had something to ask."""
        left = list(enumerate(prompts))[::-1]
        ended: list[float] = []

        async def ask() -> None:
            while left:
                seed, prompt = left.pop()
                # A prompt that is asked again does not see its first answer.
                copy = sum(other == prompt for other in prompts[:seed])
                await self._ask(seed, prompt, f"{self._salt} {copy}")
            ended.append(time.perf_counter())

        await asyncio.gather(*(ask() for _ in range(streams)))
        began = self._counts[0][0]
        full = sum(count for at, count in self._counts[1:] if at <= ended[0])
        return full / (ended[0] - began)

    async def _ask(self, seed: int, prompt: str, salt: str) -> None:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self._num_tokens,
            "ignore_eos": True,
            "seed": seed,
            "temperature": 0.0 if self._kind == "text" else 0.7,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "speculation": "auto" if self._drafts else "off",
            "cache_salt": salt,
        }
        text, count = "", 0
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = msgspec.json.decode(line[6:])
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
                    known = event["usage"]["completion_tokens"]
                    if known > count:
                        self._counts.append((time.perf_counter(), known - count))
                        count = known
        self.answers[seed] = text


async def _counters(session: aiohttp.ClientSession, url: str) -> tuple[float, float]:
    """Drafted and right tokens so far."""
    await asyncio.sleep(1.5)  # until the engine has reported
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    values = {line.split("{")[0].split()[0]: line.split()[-1] for line in lines if line[:1] != "#"}
    names = ("num_draft_tokens", "num_accepted_tokens")
    drafted, right = (float(values[f"pagoda_spec_decode_{name}_total"]) for name in names)
    return drafted, right


if __name__ == "__main__":
    main()
