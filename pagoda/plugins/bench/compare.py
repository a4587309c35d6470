# SPDX-License-Identifier: Apache-2.0
"""`pagoda bench compare`: the same load on two or more running servers in turn, and the ratios of their figures.

A machine that is shared drifts by more than what two servers differ, so only figures from one sitting compare:
every round asks each server once, with the same prompts. Each round has prompts of its own, so that no prefix
cache helps, made of token ids, so that no tokenizer changes their length.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number
from rich.console import RenderableType

from pagoda.cli import output
from pagoda.cli.files import write_json
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.options import Count, GeneralOptions, Length
from pagoda.cli.progress import progress
from pagoda.concurrency import event_loop
from pagoda.errors import ConfigError, PagodaError
from pagoda.plugins.bench.acceptance import NO_DRAFTS, Drafted, drafted_by
from pagoda.plugins.bench.datasets import RandomLengths, Sample, random_samples
from pagoda.plugins.bench.load import LoadOptions, ask_sample, run_load
from pagoda.plugins.bench.metrics import BenchReport, summarize
from pagoda.plugins.bench.sampling import LoadSampling

_MIN_PROMPTS = 4
_LETTERS = string.ascii_uppercase


@dataclass(frozen=True, slots=True)
class Server:
    base_url: str
    model: str


@dataclass(frozen=True, slots=True)
class Measured:
    base_url: str
    concurrency: int
    report: BenchReport
    lengths: Sequence[tuple[int, int]]
    """Prompt and answer tokens of each request that did not fail, as the server counts them."""
    drafted: Drafted = NO_DRAFTS
    """Drafts of the run, as far as the server's metrics tell of them."""


FIGURES: Mapping[str, Callable[[Measured], float | None]] = {
    "output tokens/s": lambda run: run.report.output_token_rate,
    "requests/s": lambda run: run.report.request_rate,
    "TTFT p50, ms": lambda run: run.report.ttft_ms.median,
    "TTFT p99, ms": lambda run: run.report.ttft_ms.p99,
    "TPOT p50, ms": lambda run: run.report.tpot_ms.median,
    "TPOT p99, ms": lambda run: run.report.tpot_ms.p99,
    "ITL p50, ms": lambda run: run.report.itl_ms.median,
    "ITL p99, ms": lambda run: run.report.itl_ms.p99,
    "drafts accepted": lambda run: run.drafted.acceptance,
    "tokens a step": lambda run: run.drafted.length,
}
"""The figures that are compared: more is better for rates, less for times."""
_OF_DRAFTS = ("drafts accepted", "tokens a step")
"""Rows that stand only where a server has drafted."""


@Parameter(name="*", group=Group("Load", sort_key=10))
@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The requests of a run, and the number of runs."""

    concurrency: str = "1,4,16"
    """Requests under way at once; several numbers, separated by commas, are measured one after the other."""
    input_len: Count = 256
    """Random token ids in a prompt."""
    output_len: Count = 64
    """Tokens to generate for each prompt."""
    vocab_size: Annotated[int, Parameter(validator=Number(gte=8))] = 256
    """Random token ids are below this."""
    num_prompts: Count | None = None
    """Requests of a run; by default twice the concurrency, at least 4."""
    repeats: Count = 3
    """Runs of each server at each concurrency; medians are compared."""
    num_warmups: Length = 1
    """Requests that each server is sent before anything is measured."""
    ignore_eos: bool = True
    """Ask for answers of the full length; --no-ignore-eos is for servers that do not know the field."""
    seed: int | None = None
    """Seed of the prompts; by default another one each time, so that no server has seen them."""
    sampling: LoadSampling = field(default_factory=LoadSampling)

    def concurrencies(self) -> list[int]:
        """The numbers of `concurrency`. Raises ConfigError if `concurrency` is not a list of positive numbers."""
        words = [word.strip() for word in self.concurrency.split(",")]
        if not all(word.isdecimal() and int(word) > 0 for word in words):
            raise ConfigError(
                "--concurrency must be positive numbers, separated by commas, such as 1,4,16, "
                f"got {self.concurrency}."
            )
        return [int(word) for word in words]

    def samples(self, count: int, rng: random.Random) -> list[Sample]:
        lengths = RandomLengths(
            input_len=self.input_len, output_len=self.output_len, vocab_size=self.vocab_size
        )
        return self.sampling.apply(
            random_samples(count, lengths, "completions", rng.getrandbits(64))
        )

    def prompts_at(self, concurrency: int) -> int:
        return self.num_prompts or max(_MIN_PROMPTS, 2 * concurrency)

    def fields(self, server: Server) -> dict[str, object]:
        """Body fields that every request carries."""
        eos = {"ignore_eos": True} if self.ignore_eos else {}
        return {"model": server.model, **eos}


def compare(
    *,
    base_url: Annotated[tuple[str, ...], Parameter(negative=())],
    model: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = (),
    output_file: Annotated[Path | None, Parameter(name=["--output", "--json"])] = None,
    load: CompareOptions = CompareOptions(),
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Put the same load on two or more OpenAI-compatible servers in turn, and compare their figures.

    Args:
        base_url: A server's address; give it once for each server. Ratios are to the first.
        model: The model's name on each server, in the same order; by default the first that each lists.
        output_file: Write the figures of all runs as JSON to this file too.
    """
    general.apply()
    _check(base_url, model)
    concurrencies = load.concurrencies()
    sampling = load.sampling.record()
    servers, runs = event_loop.run(_measure(base_url, model, load, concurrencies))
    console = output.stdout()
    names = [f"{server.model} at {server.base_url}" for server in servers]
    console.print(
        output.facts([*zip(_LETTERS, names, strict=False), ("sampling", load.sampling.summary)])
    )
    for concurrency in concurrencies:
        console.print(comparison_table(servers, concurrency, runs))
    for problem in problems(load, runs):
        output.stderr().print(problem)
    if output_file is not None:
        write_json(output_file, _record(servers, load, runs) | {"sampling": sampling})
    return 1 if any(run.report.failed for run in runs) else 0


def _check(base_urls: Sequence[str], models: Sequence[str]) -> None:
    if len(base_urls) < 2:
        raise ConfigError("--base-url must be given at least twice: there is nothing to compare.")
    if len(set(base_urls)) < len(base_urls):
        raise ConfigError("--base-url names the same server twice.")
    if models and len(models) != len(base_urls):
        raise ConfigError(
            f"--model must be given once for each --base-url ({len(base_urls)} times) or not at all, "
            f"got {len(models)}."
        )


async def _measure(
    base_urls: Sequence[str],
    models: Sequence[str],
    load: CompareOptions,
    concurrencies: Sequence[int],
) -> tuple[list[Server], list[Measured]]:
    rng = random.Random(load.seed)
    names: Sequence[str | None] = models or [None] * len(base_urls)
    servers = [
        await prepare_server(url, name, load, rng)
        for url, name in zip(base_urls, names, strict=True)
    ]
    runs = []
    with progress("runs", len(concurrencies) * load.repeats * len(servers)) as advance:
        for concurrency in concurrencies:
            for _ in range(load.repeats):
                samples = load.samples(load.prompts_at(concurrency), rng)
                for server in servers:
                    runs.append(await measure_server(server, concurrency, samples, load))
                    advance()
    return servers, runs


async def prepare_server(
    base_url: str, model: str | None, load: CompareOptions, rng: random.Random
) -> Server:
    """Asks for the model's name unless it is known, and sends the requests to warm up.

    Raises ConfigError, which names the server, if it cannot be reached or does not answer.
    """
    try:
        async with OpenAIClient(base_url) as client:
            server = Server(base_url, model or await client.first_model())
            for sample in load.samples(load.num_warmups, rng):
                await ask_sample(client, sample, load.fields(server))
    except PagodaError as error:
        said = str(error)
        raise ConfigError(said if base_url in said else f"{base_url}: {said}") from error
    return server


async def measure_server(
    server: Server, concurrency: int, samples: Sequence[Sample], load: CompareOptions
) -> Measured:
    """One run: `samples`, `concurrency` of them under way at once."""
    at_once = LoadOptions(max_concurrency=concurrency)
    async with OpenAIClient(server.base_url) as client:
        before = await drafted_by(client)
        outcomes, duration_s = await run_load(client, samples, load.fields(server), at_once)
        drafts = (await drafted_by(client)).since(before)
    lengths = [(it.prompt_tokens, it.output_tokens) for it in outcomes if it.error is None]
    report = summarize(outcomes, duration_s, None)
    return Measured(server.base_url, concurrency, report, lengths, drafts)


def medians(runs: Iterable[Measured]) -> dict[str, float | None]:
    """The median of each figure over the runs that have it; None where none has."""
    answered = [run for run in runs if run.report.completed]
    result: dict[str, float | None] = {}
    for name, figure in FIGURES.items():
        values = [value for value in map(figure, answered) if value is not None]
        result[name] = statistics.median(values) if values else None
    return result


def comparison_table(
    servers: Sequence[Server], concurrency: int, runs: Sequence[Measured]
) -> RenderableType:
    """Figures as rows; a column for each server, and behind each but the first its ratio to that."""
    of_servers = [medians(_runs_of(server, concurrency, runs)) for server in servers]
    columns = ["A"]
    for letter, _ in zip(_LETTERS[1:], servers[1:], strict=False):
        columns += [letter, f"{letter}/A"]
    rows = []
    for name in FIGURES:
        base, *others = [figures[name] for figures in of_servers]
        if name in _OF_DRAFTS and base is None and not any(others):
            continue
        cells = [_number(base)]
        for value in others:
            ratio = value / base if value is not None and base else None
            cells += [_number(value), _number(ratio)]
        rows.append((name, *cells))
    return output.table(f"{concurrency} at once", ("median of runs", *columns), rows)


def _runs_of(server: Server, concurrency: int, runs: Iterable[Measured]) -> list[Measured]:
    wanted = (server.base_url, concurrency)
    return [run for run in runs if (run.base_url, run.concurrency) == wanted]


def problems(load: CompareOptions, runs: Sequence[Measured]) -> Iterable[str]:
    """A sentence for each server that failed, or that answered another load than what was asked."""
    for base_url in dict.fromkeys(run.base_url for run in runs):
        own = [run for run in runs if run.base_url == base_url]
        failed = sum(run.report.failed for run in own)
        if failed:
            first = next(error for run in own for error in run.report.errors)
            yield f"{base_url}: {failed} requests failed, the first: {first}"
        lengths = [length for run in own for length in run.lengths]
        asked = (load.input_len, load.output_len)
        other = [length for length in lengths if length != asked]
        if other:
            yield (
                f"{base_url}: {len(other)} of {len(lengths)} answers were of another load than the "
                f"{asked[0]} prompt and {asked[1]} completion tokens asked for, "
                f"the first of {other[0][0]} and {other[0][1]}; its figures do not compare."
            )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"


def _record(
    servers: Sequence[Server], load: CompareOptions, runs: Sequence[Measured]
) -> dict[str, object]:
    recorded = []
    for server in servers:
        figures = {}
        for concurrency in load.concurrencies():
            own = _runs_of(server, concurrency, runs)
            reports = [dataclasses.asdict(run.report) for run in own]
            figures[str(concurrency)] = {"medians": medians(own), "runs": reports}
        recorded.append({**dataclasses.asdict(server), "concurrency": figures})
    asked = dataclasses.asdict(load)
    del asked["sampling"]
    return {"load": asked, "servers": recorded}
