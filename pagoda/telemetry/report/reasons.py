"""Reasons for the duration of a request: a sentence for each thing that mattered, computed from its spans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile, groupby, zip_longest

from pagoda.telemetry.report.data import RequestReport

_NOTABLE = 0.1
"""Share of the request's time."""
_INTERRUPTIONS = (("preempted", "preempted {}"), ("recovering", "a worker was lost {}"))
_KINDS = tuple(name for name, _ in _INTERRUPTIONS)
_TIMES = {1: "once", 2: "twice"}


@dataclass(frozen=True)
class Evidence:
    """Facts from which reasons are found."""

    request: RequestReport
    shared: tuple[int, float]
    """Prompt tokens of other requests in the steps that it decoded in, and the seconds of those steps."""
    num_decoded: int
    """Tokens of the steps that were seen while it decoded."""


def reasons_of(evidence: Evidence) -> tuple[str, ...]:
    """Sentences, the longest time first. There is always one: at least, the length of the answer."""
    found = sorted(_reasons(evidence), key=lambda it: -it[0])
    return tuple(sentence for _, sentence in found)


def _reasons(evidence: Evidence) -> Iterator[tuple[float, str]]:
    """Seconds and sentence of each."""
    request = evidence.request
    took = request.took
    notable = _NOTABLE * request.end_to_end
    yield from _interruptions(request)
    for name, sentence in (
        ("HTTP, prepare", "preparing it took {}"),
        ("before the trace", "ran for {} before the trace began"),
        ("queued", "waited {} in the queue"),
        ("waiting for KV", "waited {} for KV blocks"),
        ("between steps", "was in no step for {} of its turn"),
        ("between processes", "spent {} between processes"),
        ("after the trace", "went on for {} when the trace had ended"),
    ):
        if took[name] > notable:
            yield took[name], sentence.format(seconds(took[name]))
    again = sum(it.computed_again for name, _ in _INTERRUPTIONS for it in _found(request, name))
    prefill = took["prefill"] - again
    if prefill > notable:
        computed = request.prompt_tokens - request.cached_tokens
        yield prefill, f"{computed:,} prompt tokens took {seconds(prefill)} to compute"
    if request.write > notable:
        yield request.write, f"the client took {seconds(request.write)} to take the answer"
    num_tokens, shared = evidence.shared
    if shared > notable:
        sentence = f"shared steps of {seconds(shared)} with prompts of {num_tokens:,} tokens"
        yield shared, sentence
    if took["decode"] > notable or not any(took.values()):
        each = took["decode"] / max(1, evidence.num_decoded or request.output_tokens - 1)
        is_cut = evidence.num_decoded and (took["before the trace"] or took["after the trace"])
        count = evidence.num_decoded if is_cut else request.output_tokens
        yield took["decode"], f"{count:,} tokens took {seconds(each)} each"


def _interruptions(request: RequestReport) -> Iterator[tuple[float, str]]:
    """Interruptions are listed however short they were."""
    for name, told in _INTERRUPTIONS:
        found = [*_found(request, name)]
        if not found:
            continue
        count = (request.preemptions if name == "preempted" else 0) or len(found)
        waited = sum(it.waited for it in found)
        again = sum(it.computed_again for it in found)
        sentence = told.format(_TIMES.get(count, f"{count} times"))
        yield (
            waited + again,
            f"{sentence}: {seconds(waited)} until it ran again, {seconds(again)} to compute again",
        )


@dataclass(frozen=True)
class _Interruption:
    """Seconds until the request ran again, and of computing what had been there before."""

    waited: float
    computed_again: float


def _found(request: RequestReport, name: str) -> Iterator[_Interruption]:
    """Waits that began so. On its way back a request may wait for its KV, and then in the queue again."""
    runs = [
        [*phases]
        for _, phases in groupby(request.phases, key=lambda it: it.name in ("prefill", "decode"))
    ]
    for run, after in zip_longest(runs, runs[1:]):
        kind = next((it.name for it in run if it.name in _KINDS), None)
        if kind == name:
            waits = dropwhile(lambda it: it.name != name, run)
            is_prefill = after is not None and after[0].name == "prefill"
            yield _Interruption(
                sum(it.seconds for it in waits), after[0].seconds if is_prefill else 0.0
            )


def seconds(value: float) -> str:
    """A time with a unit that suits its size."""
    if value >= 1:
        return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"
    return f"{value * 1e6:.0f} µs"
