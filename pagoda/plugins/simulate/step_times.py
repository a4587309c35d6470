# SPDX-License-Identifier: Apache-2.0
"""Step times of devices: fitted to measurements, or a roofline of a model's shape and a device's speeds.

The roofline is that of Williams, Waterman and Patterson (2009): a step takes the longer of reading all weights
once and computing its tokens, and besides reads K and V in front of its tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from operator import mul
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import msgspec
import yaml

from pagoda.checkpoints.presets import PRESETS
from pagoda.errors import ConfigError
from pagoda.files import read_file

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e8)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e8)]
Whole = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Blocks = Annotated[int, msgspec.Meta(ge=0, le=10**7)]
_Large = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_MEMORY_SHARE = 0.9
"""Share of a device's memory that weights and KV may take."""
_NUM_QUANTILES = 257
_LEAST_SHARE = 0.01
_LEAST_TOKENS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Tokens that a step may compute in the time in which it reads the weights, among which a fit chooses."""


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device as a table gives it."""

    tflops: Positive
    """10^12 operations a second, in the model's number format."""
    tb_per_s: Positive
    """10^12 bytes a second from its memory."""
    gib: Positive
    link_gb_per_s: Positive = 10.0
    """10^9 bytes of KV a second to another host."""
    price_per_hour: NotNegative = 0.0
    compute_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    """Share of the arithmetic that a step reaches."""
    memory_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.7
    """Share of the bandwidth that a step reaches."""
    overhead_ms: NotNegative = 2.0
    """Milliseconds of a step besides."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of a model on which the time of a step depends."""

    parameters: Annotated[float, msgspec.Meta(gt=0, le=1e15)]
    active_parameters: _Large = 0.0
    """Parameters that compute one token; 0: all."""
    bytes_per_parameter: Positive = 2.0
    kv_bytes_per_token: Annotated[float, msgspec.Meta(ge=1, le=1e9)]
    pair_flops: _Large = 0.0
    """Operations of attention for one token and one in front of it."""


class ProcessCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processor seconds that an engine or a frontend takes."""

    per_step_s: NotNegative = 0.0
    per_sequence_s: NotNegative = 0.0
    """Seconds for each request in a step."""
    per_request_s: NotNegative = 0.0
    """Seconds for a request, once."""
    per_prompt_token_s: NotNegative = 0.0

    def steps_s(self, num_steps: int, num_seqs: int) -> float:
        """Seconds for steps with so many requests in all."""
        return num_steps * self.per_step_s + num_seqs * self.per_sequence_s

    def request_s(self, num_prompt_tokens: int) -> float:
        return self.per_request_s + num_prompt_tokens * self.per_prompt_token_s


class Slower(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processor time of a process beside others: `share` of that alone, and `more_s` for each step besides."""

    share: Positive = 1.0
    more_s: NotNegative = 0.0

    def of(self, seconds: float, num_steps: int = 1) -> float:
        """Seconds of what takes `seconds` alone."""
        return seconds * self.share + num_steps * self.more_s

    def towards(self, other: Slower, place: float) -> Slower:
        """The line from this one (0) to the `other` (1)."""
        share = self.share + place * (other.share - self.share)
        return Slower(share=share, more_s=self.more_s + place * (other.more_s - self.more_s))


class Slowdown(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processes of a machine whose workers share its cores and caches."""

    load: Positive
    """Threads of workers that compute at once, for each core."""
    worker: Slower = Slower()
    engine: Slower = Slower()
    frontend: Slower = Slower()

    def towards(self, other: Slowdown, load: float) -> Slowdown:
        """The line from this one to the `other`, at `load`."""
        place = (load - self.load) / (other.load - self.load)
        return Slowdown(
            load=load,
            worker=self.worker.towards(other.worker, place),
            engine=self.engine.towards(other.engine, place),
            frontend=self.frontend.towards(other.frontend, place),
        )


_ALONE = Slowdown(load=1.0)


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cost model of a host's steps, with the error that every figure drawn from it carries.

    The fields in seconds are those of `SimConfig`.
    """

    source: str
    base_s: NotNegative
    per_token_s: NotNegative
    floor_s: NotNegative = 0.0
    per_sequence_s: NotNegative = 0.0
    per_context_token_s: NotNegative = 0.0
    per_pair_s: NotNegative = 0.0
    error_p50: float | None = None
    """Median relative error of the steps that it was fitted to; None for a roofline, whose error is not known."""
    error_p95: float | None = None
    num_samples: int = 0
    round_trip_s: NotNegative = 0.0
    """Seconds from a request to its first token in which no process works, of a fit."""
    threads: Whole = 1
    """Threads that compute a step."""
    engine: ProcessCosts = ProcessCosts()
    frontend: ProcessCosts = ProcessCosts()
    spread: tuple[Positive, ...] = ()
    """Times of single steps as shares of what the costs say, at even quantiles; empty: all take just that."""
    spread_s: NotNegative = 0.0
    """Mean seconds of the steps that `spread` was measured with. What delays steps comes by chance over time, so
    that a step which takes n times as long varies by 1/√n as much."""
    slowdowns: tuple[Slowdown, ...] = ()
    """Slowdowns of replicas of one machine, by their loads; the first is that of one replica, which is none."""
    num_blocks: Blocks = 0
    """Blocks of the KV cache there; 0 if not known."""
    block_size: Whole = 16

    def costs(self) -> dict[str, Any]:
        """The costs under their names in `SimConfig`, in seconds."""
        names = ("base_s", "per_token_s", "floor_s")
        more = ("per_sequence_s", "per_context_token_s", "per_pair_s")
        return {name: getattr(self, name) for name in (*names, *more)}

    @property
    def has_processes(self) -> bool:
        """True if more is known than what a step takes by itself."""
        idle = ProcessCosts()
        return bool(self.spread) or self.engine != idle or self.frontend != idle

    def slowdown(self, load: float) -> Slowdown:
        """The slowdown where workers have so many threads at work for each core."""
        known = self.slowdowns
        if not known or load <= known[0].load:
            return _ALONE
        index = bisect_left(known, load, key=lambda it: it.load)
        return known[-1] if index == len(known) else known[index - 1].towards(known[index], load)

    def error(self) -> str:
        """Words about how far step times are off."""
        if self.error_p50 is None or self.error_p95 is None:
            return f"{self.source}: not measured"
        return f"{self.source}: ±{self.error_p50:.1%} median, ±{self.error_p95:.1%} p95"


class StepSample(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of a kind, as `pagoda bench steps` writes a line of: their mean."""

    num_tokens: Positive
    num_seqs: Positive
    num_requests: NotNegative = 0.0
    """Requests whose prompts are computed."""
    context_tokens: NotNegative = 0.0
    """Tokens in front of those that the step computes, of all requests."""
    pairs: _Large = 0.0
    """Pairs of a token of a prompt's chunk and one in front of it."""
    time_s: Positive
    """Seconds in which the worker is busy."""
    engine_s: NotNegative = 0.0
    """Processor seconds of the engine."""
    frontend_s: NotNegative = 0.0
    """Processor seconds of the frontend."""
    round_trip_s: NotNegative = 0.0
    """Seconds from a request to its first token in which no process works, where that was measured."""
    worker_s: NotNegative = 0.0
    """Processor seconds of the worker."""
    replicas: Whole = 1
    """Replicas that compute such steps at once; `time_s` and the others are of each."""
    cores: Whole = 1
    threads: Whole = 1
    """Threads of the worker."""
    gaps_s: tuple[Positive, ...] = ()
    """Seconds between single steps that are of one kind."""

    def likeness(self, other: StepSample) -> tuple[float, float]:
        """Differences in what is computed and in what lies in front of it; zeros for steps that are alike."""
        computed = abs(self.num_tokens - other.num_tokens) + abs(self.num_seqs - other.num_seqs)
        return (computed, abs(self.context_tokens - other.context_tokens))

    def features(self, least: float = 0.0) -> tuple[float, ...]:
        """Multipliers of `base_s`, `per_token_s`, `per_sequence_s`, `per_context_token_s` and `per_pair_s`.

        No step takes less than `least` tokens do. Of several steps, those with a prompt have one each.
        """
        share = min(1.0, self.num_requests)
        num_decodes = self.num_seqs - self.num_requests
        tokens = max(least, self.num_tokens)
        if share:
            with_prompt = num_decodes + (self.num_tokens - num_decodes) / share
            tokens = share * max(least, with_prompt) + (1 - share) * max(least, num_decodes)
        return (1.0, tokens, self.num_seqs, self.context_tokens, self.pairs)

    def process_features(self) -> tuple[float, ...]:
        """Multipliers of the fields of `ProcessCosts`."""
        num_prompt_tokens = max(0.0, self.num_tokens - self.num_seqs + self.num_requests)
        return (1.0, self.num_seqs, self.num_requests, num_prompt_tokens * (self.num_requests > 0))


def device_table(own: Mapping[str, Device]) -> dict[str, Device]:
    """All devices by name; `own` go first."""
    text = files("pagoda.plugins.simulate").joinpath("devices.yaml").read_text(encoding="utf-8")
    return {**msgspec.convert(yaml.safe_load(text), dict[str, Device]), **own}


def model_shape(name: str) -> ModelShape | None:
    """The shape of a model that has a preset; None if there is none of this name."""
    config = PRESETS.get(name)
    if config is None:
        return None
    get = {key: value for key, value in config.items() if isinstance(value, int)}.get
    hidden, layers, heads = get("hidden_size", 0), get("num_hidden_layers", 0), 0
    heads = get("num_attention_heads", 1)
    head_dim = get("head_dim", hidden // heads)
    kv_dim, inner = get("num_key_value_heads", heads) * head_dim, get("intermediate_size", 0)
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_dim
    experts = get("num_experts", get("num_local_experts", 1))
    expert = 3 * hidden * get("moe_intermediate_size", inner)
    used = min(experts, get("num_experts_per_tok", 1))
    head = get("vocab_size", 0) * hidden
    embeddings = head if config.get("tie_word_embeddings") else 2 * head
    return ModelShape(
        parameters=layers * (attention + experts * expert) + embeddings,
        active_parameters=layers * (attention + used * expert) + head,
        kv_bytes_per_token=2 * layers * kv_dim * 2,
        pair_flops=4 * layers * heads * head_dim,
    )


def roofline(model: ModelShape, device: Device, count: int, block_size: int) -> StepTimes:
    """Step times of a model on `count` devices that share each layer. Raises ConfigError: no room for KV."""
    flops = count * device.tflops * 1e12 * device.compute_share
    rate = count * device.tb_per_s * 1e12 * device.memory_share
    weights = model.parameters * model.bytes_per_parameter
    room = count * device.gib * 2**30 * _MEMORY_SHARE - weights
    num_blocks = min(10**7, int(room / model.kv_bytes_per_token / block_size))
    if num_blocks < 1:
        raise ConfigError(
            f"the model's {weights / 2**30:.0f} GiB leave no room for KV on {count} × {device.gib:g} GiB"
        )
    return StepTimes(
        source="roofline",
        base_s=device.overhead_ms / 1000,
        per_token_s=2 * (model.active_parameters or model.parameters) / flops,
        floor_s=weights / rate,
        per_context_token_s=model.kv_bytes_per_token / rate,
        per_pair_s=model.pair_flops / flops,
        num_blocks=num_blocks,
        block_size=block_size,
    )


def read_step_times(path: Path, flag: str) -> StepTimes:
    """Step times that `pagoda simulate fit` has written. Raises ConfigError: the file is none of these."""
    try:
        return msgspec.json.decode(read_file(path, flag), type=StepTimes)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{flag}: {path} is no file of pagoda simulate fit ({error}).") from None


def fit(samples: Sequence[StepSample], source: str) -> StepTimes:
    """The cost model that is closest to `samples` in relative terms, without negative costs."""
    together = [it for it in samples if it.replicas > 1]
    samples = [it for it in samples if it.replicas == 1]
    times = [it.time_s for it in samples]
    found = []
    for least in _LEAST_TOKENS:
        rows = [it.features(least) for it in samples]
        costs = _without_negative(rows, times)
        pairs = zip(rows, times, strict=True)
        errors = sorted(abs(sum(map(mul, row, costs)) / time_s - 1) for row, time_s in pairs)
        found.append((sum(error**2 for error in errors), least, costs, errors))
    _, least, costs, errors = min(found)
    base_s, per_token_s, per_sequence_s, per_context_token_s, per_pair_s = costs
    return StepTimes(
        source=source,
        base_s=base_s,
        per_token_s=per_token_s,
        floor_s=least * per_token_s,
        per_sequence_s=per_sequence_s,
        per_context_token_s=per_context_token_s,
        per_pair_s=per_pair_s,
        error_p50=errors[len(errors) // 2],
        error_p95=errors[int(0.95 * (len(errors) - 1))],
        num_samples=len(samples),
        round_trip_s=median([it.round_trip_s for it in samples if it.round_trip_s] or [0.0]),
        threads=samples[0].threads,
        engine=_process_costs(samples, [it.engine_s for it in samples]),
        frontend=_process_costs(samples, [it.frontend_s for it in samples]),
        spread=_spread(samples),
        spread_s=mean([gap for it in samples for gap in it.gaps_s] or [0.0]),
        slowdowns=_slowdowns(samples, together),
    )


def _slowdowns(alone: Sequence[StepSample], together: Sequence[StepSample]) -> tuple[Slowdown, ...]:
    """Slowdowns by loads: steps of several replicas against those of one that are alike."""
    pairs: dict[float, list[tuple[StepSample, StepSample]]] = defaultdict(list)
    for sample in together:
        nearest = min(alone, key=sample.likeness)
        pairs[sample.replicas * sample.threads / sample.cores].append((nearest, sample))
    first = alone[0].threads / alone[0].cores
    found = [
        Slowdown(
            load=load,
            worker=_slower([(one.worker_s, other.worker_s) for one, other in known]),
            engine=_slower([(one.engine_s, other.engine_s) for one, other in known]),
            frontend=_slower([(one.frontend_s, other.frontend_s) for one, other in known]),
        )
        for load, known in sorted(pairs.items())
        if load > first
    ]
    return (Slowdown(load=first), *found) if found else ()


def _slower(times: Sequence[tuple[float, float]]) -> Slower:
    """The line from seconds alone to those beside others."""
    known = [(one, other) for one, other in times if one and other]
    if not known:
        return Slower()
    more, more_s = _without_negative(
        [(one, 1.0) for one, _ in known],
        [other for _, other in known],
        [one for one, _ in known],
    )
    return Slower(share=1 + more, more_s=more_s)


def _process_costs(samples: Sequence[StepSample], seconds: Sequence[float]) -> ProcessCosts:
    known = [(it.process_features(), s) for it, s in zip(samples, seconds, strict=True) if s]
    if not known:
        return ProcessCosts()
    per_step_s, per_sequence_s, per_request_s, per_prompt_token_s = _without_negative(
        [row for row, _ in known], [s for _, s in known]
    )
    return ProcessCosts(
        per_step_s=per_step_s,
        per_sequence_s=per_sequence_s,
        per_request_s=per_request_s,
        per_prompt_token_s=per_prompt_token_s,
    )


def _spread(samples: Sequence[StepSample]) -> tuple[float, ...]:
    """Quantiles of single steps, whose mean is 1.

    Gaps tell of steps and of messages: one that is late makes a gap longer and the next one shorter by as much.
    So the variance of steps is that of gaps with twice the covariance of neighbours, and gaps are drawn together.
    """
    runs = [[gap / mean(it.gaps_s) - 1 for gap in it.gaps_s] for it in samples if it.gaps_s]
    offs = sorted(off for run in runs for off in run)
    if not offs:
        return ()
    together = sum(map(mul, offs, offs))
    neighbours = sum(one * other for run in runs for one, other in pairwise(run))
    share = min(1.0, max(0.0, 1 + 2 * neighbours / together)) ** 0.5 if together else 0.0
    last = _NUM_QUANTILES - 1
    chosen = [1 + share * offs[index * (len(offs) - 1) // last] for index in range(_NUM_QUANTILES)]
    center = mean(map(mean, pairwise(chosen)))
    return tuple(max(_LEAST_SHARE, it / center) for it in chosen)


def _without_negative(
    features: Sequence[tuple[float, ...]],
    seconds: Sequence[float],
    known: Sequence[float] | None = None,
) -> list[float]:
    """The costs whose sums with `features`, and what is `known`, are closest to `seconds`, in relative terms.

    Least squares with non-negative unknowns, by coordinate descent (Franc, Hlaváč and Navara 2005).
    """
    rows = [[value / s for value in row] for row, s in zip(features, seconds, strict=True)]
    wanted = [1 - one / s for one, s in zip(known or [0.0] * len(rows), seconds, strict=True)]
    width = len(rows[0])
    products = [[sum(row[i] * row[j] for row in rows) for j in range(width)] for i in range(width)]
    sums = [sum(row[i] * one for row, one in zip(rows, wanted, strict=True)) for i in range(width)]
    costs = [0.0] * width
    for _ in range(20_000):
        change = 0.0
        for i in range(width):
            if not products[i][i]:
                continue
            gradient = sum(map(mul, products[i], costs)) - sums[i]
            value = max(0.0, costs[i] - gradient / products[i][i])
            change = max(change, abs(value - costs[i]) * products[i][i] ** 0.5)
            costs[i] = value
        if change < 1e-9:
            break
    return costs
