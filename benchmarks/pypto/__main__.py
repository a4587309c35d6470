# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.pypto serve` and `questions`: the pypto backend over the model of its device."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cyclopts import App

from benchmarks.pypto.device import counted, installed, model_directory, violations
from benchmarks.pypto.serving import Served, requests, serve
from pagoda.cli.local_server import Connection
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.questions import Question, load_questions
from pagoda.cli.server_process import server_process
from pagoda.plugins.bench.accuracy import Grade, grade_all

app = App(help=__doc__)
_REFERENCE_PAGES = 256
"""Pages of KV that the reference has: so many that no request is preempted."""


@dataclass(frozen=True)
class _Trial:
    """The rounds of a contract."""

    calls: int
    """The least number of calls in all."""
    max_tokens: int
    """Tokens of each answer."""
    shared_pages: int
    """Pages that prompts have in common at most."""
    device: Mapping[str, object]
    """Settings of the device; see `pagoda_pypto_device.settings`."""


_SMALL = _Trial(
    10_000, 48, 4, {"failure_rate": 0.001, "timeout_rate": 0.001, "memory_bytes": 1 << 30}
)
_TRIALS: Mapping[str, _Trial] = {
    "tiny-fp32": _SMALL,
    "qwen3-small": _SMALL,
    # Its steps take seconds: one round, in which the chips fail once.
    "qwen3-14b-2l": _Trial(1, 6, 2, {"fail_at": [40], "memory_bytes": 1 << 36}),
}


@app.command(name="serve")
def serve_rounds(
    *,
    shape: Literal["tiny-fp32", "qwen3-small", "qwen3-14b-2l"] = "tiny-fp32",
    requests_of_round: int = 64,
    max_tokens: int | None = None,
    calls: int | None = None,
    num_kv_blocks: int = 18,
    max_num_batched_tokens: int = 512,
    seed: int = 0,
) -> int:
    """Serve rounds of requests until the device has had so many calls, and compare tokens with the reference.

    Args:
        shape: The contract: of pagoda-tiny in float32, or of Qwen3-14B with two layers, made small or not. One
            call in 500 of the small ones fails or never ends, and one of a round of the other.
        requests_of_round: Requests that come at once.
        max_tokens: Tokens of each answer, by default 48, or 6 of the shape qwen3-14b-2l.
        calls: The least number of calls in all, by default 10,000, or one round of the shape qwen3-14b-2l.
        num_kv_blocks: Pages of KV, few of which make requests preempt each other.
        max_num_batched_tokens: Tokens of a step at most.
        seed: Of the first round.
    """
    trial = _TRIALS[shape]
    trial = replace(
        trial,
        calls=trial.calls if calls is None else calls,
        max_tokens=trial.max_tokens if max_tokens is None else max_tokens,
    )
    totals: Counter[str] = Counter()
    while totals["calls"] < trial.calls:
        number = totals["rounds"]
        with tempfile.TemporaryDirectory() as directory:
            found = _round(
                Path(directory),
                shape,
                trial,
                seed + number,
                requests_of_round,
                num_kv_blocks,
                max_num_batched_tokens=max_num_batched_tokens,
            )
        totals.update(found)
        totals["rounds"] += 1
        print(json.dumps({"seed": seed + number, **found}), flush=True)
    print(json.dumps({"shape": shape, **totals}))
    return 1 if totals["different"] or totals["violations"] else 0


def _round(
    directory: Path,
    shape: str,
    trial: _Trial,
    seed: int,
    count: int,
    pages: int,
    **options: Any,
) -> Counter[str]:
    """Figures of one round, in which the device has so many pages of KV."""
    log = directory / "log"
    log.mkdir()
    model = None
    if shape == "tiny-fp32":
        options["dtype"] = "float32"
    else:
        model = model_directory(directory / "model", shape)
        options |= {"load_format": "dummy", "max_model_len": 1024}
    asked = requests(count, seed, pages=trial.shared_pages, max_tokens=trial.max_tokens)
    with installed(contracts=[shape], seed=seed, log=str(log), **trial.device):
        own = asyncio.run(serve(asked, "pypto", model, num_kv_blocks=pages, **options))
    roomy = options | {"num_kv_blocks": _REFERENCE_PAGES}
    expected = asyncio.run(serve(asked, "reference", model, **roomy))
    for line in violations(log)[:5]:
        print(line, file=sys.stderr)
    found = _figures(own, expected)
    found.update(counted(log))
    return found


def _figures(own: Served, expected: Served) -> Counter[str]:
    pairs = list(zip(own.answers, expected.answers, strict=True))
    return Counter(
        requests=len(pairs),
        different=sum(one != other for one, other in pairs),
        preemptions=own.load.num_preemptions,
        prefix_hit_tokens=own.load.num_prefix_hit_tokens,
        worker_restarts=own.load.num_worker_restarts,
        tokens=own.load.num_generated_tokens,
    )


@app.command
def questions(*, per_skill: int | None = None, concurrency: int = 16) -> int:
    """Ask pagoda-tiny's held-out questions of the device and of the reference in float32, and compare answers.

    Args:
        per_skill: Questions of each skill, by default all.
        concurrency: Questions under way at once.
    """
    asked = _chosen(per_skill)
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory)
        with installed(log=str(log)):
            own = _asked("pypto", asked, concurrency)
        expected = _asked("reference", asked, concurrency)
        pairs = list(zip(own, expected, strict=True))
        found = {
            "asked": len(asked),
            "right": sum(grade.correct for grade in own),
            "different": sum(one.answer != other.answer for one, other in pairs),
            "errors": sum(grade.error is not None for grade in (*own, *expected)),
            **counted(log),
        }
    print(json.dumps(found))
    return 1 if found["different"] or found["errors"] or found["violations"] else 0


def _chosen(per_skill: int | None) -> list[Question]:
    seen: Counter[str] = Counter()
    chosen = []
    for question in load_questions(None, ()):
        seen[question.skill] += 1
        if per_skill is None or seen[question.skill] <= per_skill:
            chosen.append(question)
    return chosen


def _asked(backend: str, asked: list[Question], concurrency: int) -> list[Grade]:
    flags = ["--backend", backend, "--dtype", "float32", "--block-size", "128"]
    flags += ["--max-num-seqs", "16", "--num-kv-blocks", "400", "--log-level", "warning"]
    with server_process(flags) as server:

        async def ask() -> list[Grade]:
            async with OpenAIClient(server.base_url) as client:
                return await grade_all(Connection(client, "pagoda-tiny"), asked, concurrency)

        return asyncio.run(ask())


if __name__ == "__main__":
    sys.exit(app())
