# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from pagoda.cli.main import main
from pagoda.plugins.simulate.traced_steps import traced_samples

BASE_US, TOKEN_US, PAIR_US = 500.0, 40.0, 0.5


def fragment(path: Path, role: str, parent: str, events: list[dict[str, object]]) -> None:
    header = {"uid": role, "pid": 1, "role": role, "host": "h", "parent_uid": parent, "run": "r"}
    header |= {"clock_ns": 1, "wall_ns": 1, "clock_id": "c"}
    lines = [{"fragment": header}, *events]
    (path / f"{role}.fragment.jsonl").write_text("".join(f"{json.dumps(it)}\n" for it in lines))


def span(name: str, at: float, dur: float, tid: int, **args: object) -> dict[str, object]:
    return {"ph": "X", "name": name, "ts": at, "dur": dur, "tid": tid, "args": args}


def named(tid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}}


def trace(path: Path) -> None:
    """Requests with prompts of 32 to 512 tokens, half of them cached, in chunks of 64; each then decodes."""
    engine = [named(0, "main"), named(1, "steps 0")]
    worker, at, step = [], 10.0, 0
    for row, length in enumerate((32, 64, 128, 256, 512), start=2):
        engine.append(named(row, f"request r{row}"))
        began, context, chunks = at, length // 2, [64] * (length // 128) or [length // 2]
        for count in [*chunks, *[1] * 6]:
            pairs = count * (context + count / 2) if count > 1 else 0
            took = BASE_US + TOKEN_US * count + PAIR_US * pairs
            context += count
            batch = {"tokens": count, "seqs": 1, "context_tokens": context}
            worker.append(span("step", at + 5, took, 0, step=step, **batch))
            args = {"step": step, "rows": [row], "tokens": [count]}
            engine.append(span("step", at, took + 10, 1, **args))
            at, step = at + took + 20, step + 1
        request = {"request": f"r{row}", "prompt_tokens": length, "cached_tokens": length // 2}
        engine.append(span("request", began, at - began, row, **request))
    # A prompt whose first part was computed before tracing began, and a step that tracing has cut.
    engine.append(named(9, "request late"))
    for count, front, cut in ((64, 64, False), (1, 128, True)):
        batch = {"tokens": count, "seqs": 1, "context_tokens": front + count}
        worker.append(span("step", at + 5, 9e5, 0, step=step, **batch))
        args = {"step": step, "rows": [9], "tokens": [count]} | ({"cut": True} if cut else {})
        engine.append(span("step", at, 9.1e5, 1, **args))
        at, step = at + 1e6, step + 1
    fragment(path, "engine dp0", "", engine)
    fragment(path, "worker dp0 tp0 pp0", "engine dp0", [named(0, "main"), *worker])


def test_steps_of_a_trace_are_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace(tmp_path)
    samples = traced_samples(tmp_path)
    assert len(samples) == 1 + 1 + 1 + 2 + 4 + 5 * 6
    assert max(it.time_s for it in samples) < 0.1
    merged, steps = tmp_path / "trace.json.gz", tmp_path / "steps.json"
    assert main(["trace", "merge", str(tmp_path), "--output", str(merged)]) == 0
    for source in (tmp_path, merged):
        assert main(["simulate", "fit", str(source), "--output", str(steps)]) == 0
        costs = json.loads(steps.read_text())
        costs["base_s"] += costs["per_sequence_s"]  # each step has one request
        found = [1e6 * costs[name] for name in ("base_s", "per_token_s", "per_pair_s")]
        assert found == pytest.approx([BASE_US, TOKEN_US, PAIR_US], rel=0.02)
        assert costs["error_p95"] < 0.01
    capsys.readouterr()
    assert main(["simulate", "fit", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
