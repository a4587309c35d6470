# SPDX-License-Identifier: Apache-2.0
"""What a real server says of itself under load: metrics that Prometheus takes, and a log that machines read."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from debian_programs import debian_program
from metrics_text import names, series, value

from pagoda.cli.server_process import server_process

ROOT = Path(__file__).parents[2]
NUM_REQUESTS = 12
KEYS = ("alice", "key2")


class Seen(NamedTuple):
    busy: str
    """`/metrics` while requests ran."""
    after: str
    vllm: str
    log: list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A server with two replicas, tiers and two keys, and what it said of some requests."""
    directory = tmp_path_factory.mktemp("kv")
    log = directory / "log"
    flags = ["--dp", "2", "--threads", "1", "--max-model-len", "512", "--num-kv-blocks", "128"]
    flags += ["--kv-host-bytes", "8MiB"]
    flags += ["--api-key", "alice:=a", "--api-key", "b", "--log-format", "json"]
    stderr = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            with server_process(flags) as server:
                texts = asyncio.run(_use(server.base_url))
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return Seen(*texts, lines)


async def _use(base_url: str) -> tuple[str, str, str]:
    sessions = [
        aiohttp.ClientSession(base_url, headers={"Authorization": f"Bearer {key}"}) for key in "ab"
    ]

    async def complete(number: int, begun: asyncio.Event) -> None:
        body = {"prompt": f"secret {number}", "max_tokens": 60, "ignore_eos": True, "stream": True}
        headers = {"X-Request-Id": f"request-{number}"}
        session = sessions[number % 2]
        async with session.post("/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
            async for _ in response.content:
                begun.set()

    async def text(path: str) -> str:
        async with sessions[0].get(path) as response:
            assert response.status == 200
            return await response.text()

    try:
        begun = [asyncio.Event() for _ in range(NUM_REQUESTS)]
        answers = asyncio.gather(*(complete(*each) for each in enumerate(begun)))
        await asyncio.gather(*(one.wait() for one in begun))
        busy = await text("/metrics")
        await answers
        async with sessions[0].post("/v1/completions", json={"prompt": ""}) as response:
            assert response.status == 400
        return busy, await text("/metrics"), await text("/metrics/vllm")
    finally:
        for session in sessions:
            await session.close()


@pytest.mark.parametrize("when", ["busy", "after"])
def test_prometheus_has_no_complaint(seen: Seen, when: str) -> None:
    promtool = debian_program("promtool", package="prometheus")
    text = getattr(seen, when)
    check = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


def test_figures_agree_with_what_was_asked(seen: Seen) -> None:
    text = seen.after
    for key in KEYS:
        count = NUM_REQUESTS / len(KEYS)
        labels = {"key": key, "model_name": "pagoda-tiny"}
        assert value(text, "pagoda_requests_total", finish_reason="length", **labels) == count
        for name in ("time_to_first_token", "request_queue_time", "request_prefill_time"):
            assert value(text, f"pagoda_{name}_seconds_count", **labels) == count
        assert value(text, "pagoda_request_generated_tokens_sum", **labels) == 60 * count
    generated = series(text, "pagoda_generated_tokens_total")
    assert [labels["replica"] for labels, _ in generated] == ["0", "1"]
    assert sum(tokens for _, tokens in generated) == 60 * NUM_REQUESTS
    for replica in "01":
        steps = value(text, "pagoda_engine_steps_total", replica=replica)
        assert value(text, "pagoda_step_tokens_count", replica=replica) == steps > 0
        assert value(text, "pagoda_step_sequences_count", replica=replica) == steps
        for phase in ("schedule", "submit", "prepare", "forward", "sample", "update"):
            name = "pagoda_step_phase_seconds_total"
            assert value(text, name, replica=replica, phase=phase) > 0
    assert value(text, "pagoda_http_errors_total", route="/v1/completions", status="400") == 1
    success = value(seen.vllm, "vllm:request_success_total", finished_reason="length")
    assert success == NUM_REQUESTS


def test_every_process_is_there_with_its_memory(seen: Seen) -> None:
    memory = {
        (labels["replica"], labels["process"]): size
        for labels, size in series(seen.after, "pagoda_process_resident_memory_bytes")
    }
    assert memory.keys() == {
        ("", "frontend"),
        ("0", "engine dp0"),
        ("0", "worker dp0 tp0 pp0"),
        ("1", "engine dp1"),
        ("1", "worker dp1 tp0 pp0"),
    }
    assert all(size > 2**20 for size in memory.values())


def test_what_dashboard_rules_and_page_name_is_there(seen: Seen) -> None:
    there = names(seen.after) | {
        re.sub(r"_(bucket|sum|count)$", "", sample)
        for sample in re.findall(r"^(pagoda_\w+)", seen.after, re.MULTILINE)
    }
    deploy = ROOT / "deploy"
    for path in (
        deploy / "grafana" / "pagoda.json",
        deploy / "prometheus" / "rules.yml",
        deploy / "prometheus" / "alerts.yml",
        ROOT / "docs" / "metrics.md",
    ):
        text = path.read_text(encoding="utf-8")
        asked = {
            re.sub(r"_(bucket|sum|count)$", "", name)
            for name in re.findall(r"\bpagoda_[a-z_]+[a-z]\b", text)
        }
        missing = asked - there - {"pagoda_request"}
        # There are no experts in this model, and perhaps no drafts.
        assert missing <= {
            "pagoda_expert_tokens_total",
            "pagoda_expert_rank_tokens_total",
            "pagoda_spec_decode_num_accepted_tokens_per_pos_total",
        }, path


def test_each_answer_has_one_line_and_the_log_no_text(seen: Seen) -> None:
    answers = [line for line in seen.log if "finish_reason" in line]
    ids = sorted(line["request_id"].rpartition("-")[0] for line in answers)
    assert ids == sorted(f"request-{number}" for number in range(NUM_REQUESTS))
    for line in answers:
        assert line["output_tokens"] == 60
        assert line["key"] in KEYS
        assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["duration_ms"]
    paths = [line["path"] for line in seen.log if "path" in line]
    assert paths == ["/v1/completions"]  # that scrapes succeed is no news
    assert "secret" not in json.dumps(seen.log)
