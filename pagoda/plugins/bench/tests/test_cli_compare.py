# SPDX-License-Identifier: Apache-2.0
"""Two servers under the same load: simulated ones with other speeds, and doubles that misbehave."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from pagoda.cli.answer import RequestTimes
from pagoda.cli.server_process import ServerProcess, server_process
from pagoda.errors import ConfigError
from pagoda.plugins.bench.acceptance import Drafted, drafted
from pagoda.plugins.bench.compare import (
    FIGURES,
    CompareOptions,
    Measured,
    Server,
    comparison_table,
    measure_server,
    medians,
    prepare_server,
    problems,
)
from pagoda.plugins.bench.metrics import summarize

SIM = ["--executor", "sim", "--log-level", "warning"]
SHORT = CompareOptions(input_len=5, output_len=2, num_prompts=3)


@pytest.fixture(scope="module")
def fast_and_slow() -> Iterator[tuple[ServerProcess, ServerProcess]]:
    with (
        server_process(["fast", *SIM]) as fast,
        server_process(["slow", *SIM, "--sim-base-ms", "100"]) as slow,
    ):
        yield fast, slow


def test_the_slower_server_is_slower(
    fast_and_slow: tuple[ServerProcess, ServerProcess], tmp_path: Path
) -> None:
    fast, slow = fast_and_slow
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [
            *[sys.executable, "-m", "pagoda", "bench", "compare", "--json", str(figures)],
            *["--base-url", fast.base_url, "--base-url", slow.base_url, "--concurrency", "1,2"],
            *["--repeats", "2", "--num-prompts", "2", "--input-len", "20", "--output-len", "6"],
            *["--temperature", "0.7", "--top-k", "20"],
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert f"A fast at {fast.base_url}" in lines
    assert f"B slow at {slow.base_url}" in lines
    assert "sampling temperature 0.7, top-k 20" in lines
    assert lines.count("median of runs A B B/A") == 2
    assert [line for line in lines if line.endswith("at once")] == ["1 at once", "2 at once"]
    record = json.loads(figures.read_text())
    assert (record["sampling"]["temperature"], record["sampling"]["top_k"]) == (0.7, 20)
    a, b = record["servers"]
    assert (a["model"], b["model"]) == ("fast", "slow")
    for concurrency in ("1", "2"):
        ours, theirs = a["concurrency"][concurrency], b["concurrency"][concurrency]
        assert set(ours["medians"]) == set(FIGURES)
        for run in ours["runs"] + theirs["runs"]:
            assert (run["prompt_tokens"], run["output_tokens"]) == (2 * 20, 2 * 6)
        assert len(ours["runs"]) == len(theirs["runs"]) == 2
        assert theirs["medians"]["TPOT p50, ms"] > 2 * ours["medians"]["TPOT p50, ms"]
        assert theirs["medians"]["output tokens/s"] < ours["medians"]["output tokens/s"] / 2


class _Double:
    """Lists a model `m`, and answers with two tokens and the usage it is told to report."""

    def __init__(self, usage: dict[str, int], status: int = 200) -> None:
        self.bodies: list[dict[str, object]] = []
        self._usage = usage
        self._status = status

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        if self._status != 200:
            return web.json_response({"error": {"message": "out of paper"}}, status=self._status)
        token = 'data: {"choices":[{"index":0,"text":"x"}]}\n\n'
        usage = "data: " + json.dumps({"choices": [], "usage": self._usage}) + "\n\n"
        return web.Response(text=token * 2 + usage + "data: [DONE]\n\n")


async def test_requests_are_token_ids_of_the_length_asked_for() -> None:
    double = _Double({"prompt_tokens": 5, "completion_tokens": 2})
    rng = random.Random(0)
    async with TestServer(double.app()) as http:
        server = await prepare_server(str(http.make_url("")), None, SHORT, rng)
        assert server.model == "m"
        measured = await measure_server(server, 2, SHORT.samples(3, rng), SHORT)
    assert measured.report.completed == 3
    assert not list(problems(SHORT, [measured]))
    assert len(double.bodies) == SHORT.num_warmups + 3
    prompts = [body["prompt"] for body in double.bodies]
    assert len({str(prompt) for prompt in prompts}) == len(prompts)
    for body in double.bodies:
        assert isinstance(body["prompt"], list)
        assert len(body["prompt"]) == 5
        assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("m", 2, True)
        assert (body["temperature"], body["top_p"]) == (0.0, 1.0)


async def test_another_load_than_asked_for_is_said() -> None:
    double = _Double({"prompt_tokens": 6, "completion_tokens": 2})
    async with TestServer(double.app()) as http:
        server = Server(str(http.make_url("")), "m")
        samples = SHORT.samples(3, random.Random(0))
        measured = await measure_server(server, 1, samples, SHORT)
    [problem] = problems(SHORT, [measured])
    assert "3 of 3 answers were of another load" in problem
    assert "the first of 6 and 2" in problem


async def test_a_server_that_refuses_is_named_before_the_load_and_counted_in_it() -> None:
    said = "The server answered with status 503: out of paper"
    async with TestServer(_Double({}, status=503).app()) as http:
        url = str(http.make_url(""))
        with pytest.raises(ConfigError) as caught:
            await prepare_server(url, None, SHORT, random.Random(0))
        samples = SHORT.samples(3, random.Random(0))
        measured = await measure_server(Server(url, "m"), 1, samples, SHORT)
    assert str(caught.value) == f"{url}: {said}"
    [problem] = problems(SHORT, [measured])
    assert problem.endswith(f"3 requests failed, the first: {said}")
    assert medians([measured]) == dict.fromkeys(FIGURES)


def test_medians_are_of_the_runs_of_a_server() -> None:
    def run(duration_s: float) -> Measured:
        outcome = RequestTimes(0.0, duration_s, [1.0, duration_s], prompt_tokens=5, output_tokens=2)
        return Measured("u", 1, summarize([outcome], duration_s, None), [(5, 2)])

    figures = medians([run(2.0), run(4.0), run(10.0)])
    assert figures["output tokens/s"] == pytest.approx(0.5)
    assert figures["TPOT p50, ms"] == pytest.approx(3000)
    assert figures["TTFT p99, ms"] == pytest.approx(1000)


PAGODA = """# TYPE pagoda_spec_decode_num_drafts counter
pagoda_spec_decode_num_drafts_total{model="m",replica="0"} 4.0
pagoda_spec_decode_num_drafts_total{model="m",replica="1"} 6.0
pagoda_spec_decode_num_draft_tokens_total{model="m",replica="0"} 40.0
pagoda_spec_decode_num_accepted_tokens_total{model="m",replica="0"} 20.0
pagoda_spec_decode_num_accepted_tokens_per_pos_total{model="m",position="0"} 9.0
"""


@pytest.mark.parametrize(
    "text",
    [PAGODA, PAGODA.replace("pagoda_", "vllm:"), PAGODA + PAGODA.replace("pagoda_", "vllm:")],
)
def test_drafts_are_those_of_all_replicas_of_a_run(text: str) -> None:
    run = drafted(text).since(Drafted(drafts=5.0, draft_tokens=20.0, accepted_tokens=5.0))
    assert run == Drafted(drafts=5.0, draft_tokens=20.0, accepted_tokens=15.0)
    assert (run.acceptance, run.length) == (0.75, 4.0)


def test_a_server_that_drafts_has_its_acceptance_in_the_table() -> None:
    outcome = RequestTimes(0.0, 2.0, [1.0, 2.0], prompt_tokens=5, output_tokens=2)
    report = summarize([outcome], 2.0, None)
    silent, drafting = (
        Measured(url, 1, report, [(5, 2)], drafts)
        for url, drafts in (("a", Drafted()), ("b", Drafted(5.0, 20.0, 15.0)))
    )
    servers = [Server("a", "m"), Server("b", "m")]
    console = Console(width=100)
    with console.capture() as told:
        console.print(comparison_table(servers, 1, [silent, drafting]))
    rows = [" ".join(line.split()) for line in told.get().splitlines()]
    assert "drafts accepted – 0.75 –" in rows
    assert "tokens a step – 4.00 –" in rows
    with console.capture() as told:
        console.print(comparison_table(servers[:1], 1, [silent]))
    assert "accepted" not in told.get()
