# SPDX-License-Identifier: Apache-2.0
"""`pagoda bench serve`: load on a running server, and its latencies.

The server may be any that speaks the OpenAI API. Nothing of Pagoda's engine is used here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number
from rich.console import Group as Stack

from pagoda.cli import output
from pagoda.cli.files import write_json
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.options import Count, GeneralOptions, Length, TrustOptions
from pagoda.cli.progress import progress
from pagoda.concurrency import event_loop
from pagoda.errors import ConfigError
from pagoda.plugins.bench.datasets import (
    Endpoint,
    RandomLengths,
    Sample,
    jsonl_samples,
    random_samples,
    sharegpt_samples,
)
from pagoda.plugins.bench.load import LoadOptions, ask_sample, run_load
from pagoda.plugins.bench.metrics import BenchReport, Distribution, Goal, parse_goal, summarize
from pagoda.plugins.bench.sampling import LoadSampling


@Parameter(name="*", group=Group("Requests", sort_key=10))
@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The requests to send."""

    dataset: Annotated[
        Literal["random", "sharegpt", "jsonl"], Parameter(name=["--dataset", "--dataset-name"])
    ] = "random"
    """random makes up token ids; sharegpt reads conversations; jsonl reads one request a line."""
    dataset_path: Path | None = None
    """The file of a sharegpt or jsonl dataset."""
    num_prompts: Count = 100
    """Number of requests to send."""
    endpoint: Endpoint | None = None
    """completions or chat; by default completions for random prompts, else chat."""
    random_input_len: Count = 256
    """Tokens in a random prompt."""
    random_output_len: Count = 64
    """Tokens to ask for after a random prompt."""
    random_prefix_len: Length = 0
    """Further tokens with which all random prompts begin."""
    random_range_ratio: Annotated[float, Parameter(validator=Number(gte=0, lt=1))] = 0.0
    """Random lengths vary uniformly by this share."""
    random_vocab_size: Annotated[int, Parameter(validator=Number(gte=8))] = 256
    """Random token ids are below this."""
    output_len: Count | None = None
    """The longest answer to a sharegpt or jsonl request that names none."""
    ignore_eos: bool | None = None
    """Go on to the length asked for, past the end of the answer; by default for random only."""

    def samples(self, seed: int) -> list[Sample]:
        """The requests to send. Raises ConfigError if the dataset's file is missing or unreadable."""
        if self.dataset == "random":
            lengths = RandomLengths(
                input_len=self.random_input_len,
                output_len=self.random_output_len,
                prefix_len=self.random_prefix_len,
                range_ratio=self.random_range_ratio,
                vocab_size=self.random_vocab_size,
            )
            return random_samples(self.num_prompts, lengths, self.endpoint or "completions", seed)
        if self.dataset_path is None:
            raise ConfigError(f"--dataset {self.dataset} needs --dataset-path FILE.")
        read = sharegpt_samples if self.dataset == "sharegpt" else jsonl_samples
        return read(self.dataset_path, self.num_prompts, self.endpoint or "chat", self.output_len)

    def common_fields(self) -> dict[str, object]:
        """Body fields that every request carries."""
        ignores = self.dataset == "random" if self.ignore_eos is None else self.ignore_eos
        return {"ignore_eos": True} if ignores else {}


def serve(
    *,
    base_url: str = "http://127.0.0.1:8000",
    model: str | None = None,
    api_key: str | None = None,
    output_file: Annotated[Path | None, Parameter(name="--output")] = None,
    requests: RequestOptions = RequestOptions(),
    sampling: LoadSampling = LoadSampling(),
    load: LoadOptions = LoadOptions(),
    trust: TrustOptions = TrustOptions(),
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Put load on any OpenAI-compatible server and report its latencies and throughput.

    Args:
        base_url: The server's address.
        model: The model's name there; by default the first that the server lists.
        api_key: The bearer token for the server.
        output_file: Write the figures as JSON to this file too.
    """
    general.apply()
    goal = parse_goal(load.goodput)
    if not load.stream and goal is not None and goal.keys() != {"e2e"}:
        raise ConfigError(
            "--goodput takes e2el alone with --no-stream, which shows no single tokens."
        )
    samples = sampling.apply(requests.samples(load.seed))
    client = OpenAIClient(base_url, api_key, trust.context)
    report = event_loop.run(_measure(client, model, samples, requests, load, goal))
    output.stdout().print(report_table(base_url, sampling.summary, report))
    for error, count in report.errors.items():
        output.stderr().print(f"{count} failed: {error}")
    if output_file is not None:
        record = {
            "base_url": base_url,
            "requests": dataclasses.asdict(requests),
            "sampling": sampling.record(),
            "load": dataclasses.asdict(load),
            "report": dataclasses.asdict(report),
        }
        write_json(output_file, record)
    return 0 if report.completed else 1


async def _measure(
    connection: OpenAIClient,
    model: str | None,
    samples: list[Sample],
    requests: RequestOptions,
    load: LoadOptions,
    goal: Goal | None,
) -> BenchReport:
    async with connection as client:
        common = {"model": model or await client.first_model(), **requests.common_fields()}
        for _ in range(load.num_warmups):
            await ask_sample(client, samples[0], common, stream=load.stream)
        with progress("requests", len(samples)) as advance:
            measured = await run_load(client, samples, common, load, advance)
    return summarize(*measured, goal)


def report_table(title: str, sampling: str, report: BenchReport) -> Stack:
    """The figures as two tables in one: counts and rates, then latencies."""
    counts = output.facts([("sampling", sampling), *_count_rows(report)])
    latencies = output.table(
        "Latency in ms",
        ("", "mean", "median", "p90", "p99"),
        (
            ("time to first token (TTFT)", *_cells(report.ttft_ms)),
            ("time per output token (TPOT)", *_cells(report.tpot_ms)),
            ("inter-token latency (ITL)", *_cells(report.itl_ms)),
            ("end to end (E2E)", *_cells(report.e2e_ms)),
        ),
    )
    return Stack(f"\nLoad on {title}\n", counts, "", latencies)


def _count_rows(report: BenchReport) -> Iterable[tuple[str, str]]:
    yield "requests", f"{report.completed} completed, {report.failed} failed"
    yield "duration", f"{report.duration_s:.2f} s"
    yield (
        "tokens",
        f"{report.prompt_tokens:,} in, {report.output_tokens:,} out "
        f"in {report.output_events:,} events",
    )
    yield "request throughput", f"{report.request_rate:.2f} requests/s"
    if report.goodput is not None:
        yield "goodput", f"{report.goodput:.2f} requests/s"
    yield "output throughput", f"{report.output_token_rate:,.1f} tokens/s"
    yield "total throughput", f"{report.total_token_rate:,.1f} tokens/s"


def _cells(values: Distribution) -> list[str]:
    numbers = (values.mean, values.median, values.p90, values.p99)
    return ["–" if number is None else f"{number:,.2f}" for number in numbers]
