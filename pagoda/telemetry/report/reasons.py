"""Why a request took so long: a sentence for each thing that mattered, computed from its spans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from pagoda.telemetry.report.data import RequestReport

_NOTABLE = 0.1
"""Share of the request's time."""
_INTERRUPTIONS = (("preempted", "preempted {}"), ("recovering", "a worker was lost {}"))
_TIMES = {1: "once", 2: "twice"}


@dataclass(frozen=True)
class Evidence:
    """What there is to judge by."""

    request: RequestReport
    shared: tuple[int, float]
    """Prompt tokens of other requests in the steps that it decoded in, and the seconds of those steps."""


def reasons_of(evidence: Evidence) -> tuple[str, ...]:
    """What took most comes first. There is always a reason: at least, how long the answer was."""
    found = sorted(_reasons(evidence), key=lambda it: -it[0])
    return tuple(sentence for _, sentence in found)


def _reasons(evidence: Evidence) -> Iterator[tuple[float, str]]:
    """Seconds and sentence of each."""
    request = evidence.request
    took = {part.name: part.seconds for part in request.parts}
    notable = _NOTABLE * request.end_to_end
    yield from _interruptions(request)
    for name, sentence in (
        ("HTTP, prepare", "preparing it took {}"),
        ("queued", "waited {} in the queue"),
        ("waiting for KV", "waited {} for KV blocks"),
        ("between steps", "was in no step for {} of its turn"),
        ("between processes", "spent {} between processes"),
    ):
        if took[name] > notable:
            yield took[name], sentence.format(seconds(took[name]))
    again = sum(_computed_again(request, name) for name, _ in _INTERRUPTIONS)
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
        each = took["decode"] / max(1, request.output_tokens - 1)
        yield took["decode"], f"{request.output_tokens:,} tokens took {seconds(each)} each"


def _interruptions(request: RequestReport) -> Iterator[tuple[float, str]]:
    """These are told however short they were."""
    for name, told in _INTERRUPTIONS:
        times = [it for it in request.phases if it.name == name]
        if not times:
            continue
        count = max(len(times), request.preemptions if name == "preempted" else 0)
        waited = sum(it.seconds for it in times)
        again = _computed_again(request, name)
        sentence = told.format(_TIMES.get(count, f"{count} times"))
        yield (
            waited + again,
            f"{sentence}: {seconds(waited)} until it ran again, {seconds(again)} to compute again",
        )


def _computed_again(request: RequestReport, after: str) -> float:
    return sum(
        it.seconds
        for before, it in pairwise(request.phases)
        if before.name == after and it.name == "prefill"
    )


def seconds(value: float) -> str:
    """With the unit that people would take."""
    if value >= 1:
        return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"
    return f"{value * 1e6:.0f} µs"
