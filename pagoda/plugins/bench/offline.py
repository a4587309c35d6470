# SPDX-License-Identifier: Apache-2.0
"""`pagoda bench offline`: the throughput of the engine with all prompts at hand, without HTTP."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pagoda.cli import output
from pagoda.cli.files import write_json
from pagoda.cli.options import Count, GeneralOptions, Length, ProfileOptions
from pagoda.llm.engine_options import EngineOptions, ExecutorOptions, ParallelOptions
from pagoda.llm.llm import LLM
from pagoda.llm.outputs import RequestOutput
from pagoda.messages.frontend import FinishReason
from pagoda.plugins.bench.datasets import RandomLengths, random_prompts
from pagoda.plugins.bench.sampling import BenchSampling


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """The figures of one run, model loading left out."""

    duration_s: float
    requests: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    output_tokens: int


def offline(
    model: str | None = None,
    *,
    num_prompts: Count = 100,
    input_len: Count = 256,
    output_len: Count = 64,
    prefix_len: Length = 0,
    output_file: Annotated[Path | None, Parameter(name="--output")] = None,
    sampling: BenchSampling = BenchSampling(),
    engine: EngineOptions = EngineOptions(),
    parallel: ParallelOptions = ParallelOptions(),
    executor: ExecutorOptions = ExecutorOptions(),
    profile: ProfileOptions = ProfileOptions(),
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Answer random prompts as fast as the engine can, and report tokens a second.

    Args:
        model: The model to load; by default the embedded one.
        num_prompts: Number of prompts.
        input_len: Random tokens in a prompt.
        output_len: Tokens to generate for each prompt.
        prefix_len: Further tokens with which all prompts begin.
        output_file: Write the figures as JSON to this file too.
    """
    general.apply()
    parallel.check_prompts_at_once(num_prompts)
    params = sampling.params(max_tokens=output_len, ignore_eos=True, seed=engine.seed or 0)
    files = executor.resolve(engine, model, parallel)
    config = executor.engine_config(engine, files.model, parallel)
    with LLM(configuration=(files, config, parallel.data_parallel_policy)) as llm:
        lengths = RandomLengths(input_len=input_len, output_len=output_len, prefix_len=prefix_len)
        prompts = random_prompts(num_prompts, lengths, engine.seed or 0)
        if profile.profile is not None:
            llm.start_profile(profile.profile, profile.profile_dir)
        start = time.perf_counter()
        outputs = llm.generate([prompt for prompt, _ in prompts], params)
        report = summarize(outputs, time.perf_counter() - start)
        if profile.profile is not None:
            output.stderr().print(f"The trace is in {llm.stop_profile()}.", soft_wrap=True)
    output.stdout().print(output.facts(_rows(files.served_name, sampling.summary, report)))
    failures = [answer.error for request in outputs for answer in request.outputs if answer.error]
    if failures:
        output.stderr().print(f"{len(failures)} failed, the first: {failures[0]}")
    if output_file is not None:
        record = {
            "model": files.served_name,
            "sampling": sampling.record() | {"seed": params.seed},
            **dataclasses.asdict(report),
        }
        write_json(output_file, record)
    return 1 if failures else 0


def summarize(outputs: Sequence[RequestOutput], duration_s: float) -> OfflineReport:
    """Counts of the requests that were answered to the end."""
    good = [
        request
        for request in outputs
        if all(answer.finish_reason != FinishReason.ERROR for answer in request.outputs)
    ]
    return OfflineReport(
        duration_s=duration_s,
        requests=len(good),
        prompt_tokens=sum(len(request.prompt_token_ids) for request in good),
        cached_tokens=sum(request.num_cached_tokens for request in good),
        output_tokens=sum(len(answer.token_ids) for request in good for answer in request.outputs),
    )


def _rows(model: str, sampling: str, report: OfflineReport) -> list[tuple[str, str]]:
    num_tokens = report.prompt_tokens + report.output_tokens
    return [
        ("model", model),
        ("sampling", sampling),
        ("requests", f"{report.requests} in {report.duration_s:.2f} s"),
        (
            "tokens",
            f"{report.prompt_tokens:,} in ({report.cached_tokens:,} from the prefix cache), "
            f"{report.output_tokens:,} out",
        ),
        ("output throughput", f"{report.output_tokens / report.duration_s:,.1f} tokens/s"),
        ("total throughput", f"{num_tokens / report.duration_s:,.1f} tokens/s"),
    ]
