# SPDX-License-Identifier: Apache-2.0
"""Parts of the time of each request, from the spans of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile, groupby, pairwise, zip_longest

import msgspec

from pagoda.plugins.trace.merge.model import Process, Row, Trace, TraceSpan, read_args
from pagoda.plugins.trace.merge.steps import Step, StepsByRow, steps_by_row
from pagoda.plugins.trace.report.data import Phase, RequestReport, parts_of, seconds
from pagoda.plugins.trace.report.intervals import Interval, covered, union, without

BEFORE, AFTER = "before the trace", "after the trace"
"""Parts of requests that ran when tracing began, or when it ended in their engine."""
PARTS = (
    "HTTP, prepare",
    BEFORE,
    "queued",
    "waiting for KV",
    "prefill",
    "decode",
    "preempted",
    "recovering",
    "between steps",
    "between processes",
    AFTER,
)
"""Parts of a request's time, in the order of the table."""
_COMPUTING = ("prefill", "decode")
_WAIT = "waiting for KV"
_PHASES = ("queued", _WAIT, *_COMPUTING, "preempted", "recovering")


class _Figures(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    finish_reason: str = ""
    detokenize_ms: float = 0.0
    write_ms: float = 0.0


@dataclass(frozen=True)
class _RequestRows:
    """The rows of one request: the outermost that answers it, and those of engines."""

    process: Process
    outer: Row
    engines: list[tuple[Process, Row]] = field(default_factory=list)


def request_reports(
    trace: Trace, steps: Mapping[int, Sequence[Step]]
) -> Iterator[tuple[RequestReport, list[float]]]:
    """Each request that somebody has told of, and the times between its tokens where these were traced."""
    by_row = steps_by_row(steps)
    for request, seen in _rows_of_requests(trace).items():
        for whole in seen.outer.named("request")[:1]:
            yield _report(request, whole, seen, by_row), _token_times(seen)


def _rows_of_requests(trace: Trace) -> dict[str, _RequestRows]:
    """Processes come in order, so that the first row of a request is a router's if there is one."""
    found: dict[str, _RequestRows] = {}
    for process in trace.processes:
        for row in process.rows:
            if row.request is None or not row.spans:
                continue
            if process.header.kind != "engine":
                before = found.get(row.request)
                if before is None or _replaces(process, row, before):
                    engines = [] if before is None else before.engines
                    found[row.request] = _RequestRows(process, row, engines)
            elif row.request in found:
                found[row.request].engines.append((process, row))
    return found


def _replaces(process: Process, row: Row, before: _RequestRows) -> bool:
    """True if a row tells more of a request than the outermost before: a prefill host answers with one token, and
    of a request that was traced twice in a process the second row tells all."""
    if row.is_prefill == before.outer.is_prefill:
        return process is before.process
    return before.outer.is_prefill


def _report(
    request: str, whole: TraceSpan, seen: _RequestRows, by_row: StepsByRow
) -> RequestReport:
    phases = _phases(whole, seen)
    computing = union(it.interval for it in phases if it.name in _COMPUTING)
    own = [step for process, row in seen.engines for step in by_row.get((process.pid, row.tid), ())]
    stepping = union(it.place.span.interval for it in own)
    parts = _parts(whole, seen, phases, stepping if own else computing)
    figures = _figures(whole)
    in_engine = [_figures(span) for _, row in seen.engines for span in row.named("request")]
    firsts = seen.outer.named("first token")
    report = RequestReport(
        request=request,
        arrived=whole.start / 1e9,
        end_to_end=whole.ns / 1e9,
        first_token=(firsts[0].end - whole.start) / 1e9 if firsts else None,
        per_token=_per_token(seen.outer, figures.output_tokens),
        prompt_tokens=figures.prompt_tokens,
        cached_tokens=figures.cached_tokens,
        output_tokens=figures.output_tokens,
        preemptions=sum(it.preemptions for it in in_engine),
        finish_reason=figures.finish_reason,
        parts=parts_of({name: ns / 1e9 for name, ns in parts.items()}, sum(parts.values()) / 1e9),
        phases=tuple(_shown(phase, whole) for phase in (*_before(whole, seen), *phases)),
        detokenize=figures.detokenize_ms / 1e3,
        write=figures.write_ms / 1e3,
    )
    found = [*_reasons(report, _shared(own, seen), _num_decoded(own, phases))]
    found.sort(key=lambda it: -it[0])  # the longest time first
    return replace(report, reasons=tuple(sentence for _, sentence in found))


def _phases(whole: TraceSpan, seen: _RequestRows) -> list[TraceSpan]:
    """Phases within the request, in order, one at a time: the later of two engines counts once the earlier has
    ended. What one engine does goes before another's wait for its KV."""
    found = [
        span
        for _, row in seen.engines
        for span in row.named(*_PHASES)
        if span.end > whole.start and span.start < whole.end
    ]
    phases: list[TraceSpan] = []
    free = whole.start
    for span in sorted(found, key=lambda it: it.start):
        start, end = max(span.start, free), min(span.end, whole.end)
        if end > start and span.name != _WAIT:
            phases.append(TraceSpan(start, end, span.name, b""))
            free = end
    taken, free = [it.interval for it in phases], whole.start
    for span in sorted((it for it in found if it.name == _WAIT), key=lambda it: it.start):
        start, end = max(span.start, free), min(span.end, whole.end)
        if end > start:
            phases += [TraceSpan(*part, _WAIT, b"") for part in without((start, end), taken)]
            free = end
    return sorted(phases, key=lambda it: it.start)


def _parts(
    whole: TraceSpan, seen: _RequestRows, phases: Sequence[TraceSpan], stepping: Sequence[Interval]
) -> dict[str, int]:
    """Nanoseconds of each part; together they are the request's time."""
    parts = dict.fromkeys(PARTS, 0)
    parts["HTTP, prepare"] = sum(it.ns for it in seen.outer.named("prepare"))
    parts[BEFORE] = sum(it.ns for it in _before(whole, seen))
    parts[AFTER] = _after(whole, seen)
    for phase in phases:
        computing = phase.name in _COMPUTING
        took = covered(stepping, *phase.interval) if computing else phase.ns
        parts["between steps"] += phase.ns - took
        parts[phase.name] += took
    parts["between processes"] = max(0, whole.ns - sum(parts.values()))
    return parts


def _before(whole: TraceSpan, seen: _RequestRows) -> list[TraceSpan]:
    """The time before tracing began in the engine that had the request, if there is any."""
    process, row = min(
        seen.engines, key=lambda it: it[1].spans[0].start, default=(seen.process, seen.outer)
    )
    start = max((it.end for it in seen.outer.named("prepare")), default=whole.start)
    end = min(_traced_from(process, row), whole.end)
    return [TraceSpan(start, end, BEFORE, b"")] if end > start else []


def _traced_from(process: Process, row: Row) -> int:
    """The last time before the end of the row at which tracing began in the process."""
    return max((at for at in process.began if at <= row.spans[0].end), default=0)


def _after(whole: TraceSpan, seen: _RequestRows) -> int:
    """Nanoseconds for which an engine went on with the request when its tracing had ended."""
    rows = sorted((row for _, row in seen.engines), key=lambda it: it.spans[0].end)
    own = [span for row in rows[-1:] for span in row.named("request")]
    return sum(max(0, whole.end - span.end) for span in own if not _figures(span).finish_reason)


def _num_decoded(own: Sequence[Step], phases: Sequence[TraceSpan]) -> int:
    """Tokens of the steps that were seen while it decoded."""
    decoding = union(it.interval for it in phases if it.name == "decode")
    ends = (step.place.span.end for step in own if step.is_whole)
    return sum(covered(decoding, end - 1, end) for end in ends)


def _shown(phase: TraceSpan, whole: TraceSpan) -> Phase:
    return Phase(phase.name, (phase.start - whole.start) / 1e9, phase.ns / 1e9)


def _figures(span: TraceSpan) -> _Figures:
    return read_args(span.args, _Figures) or _Figures()


def _per_token(outer: Row, output_tokens: int) -> float | None:
    streams = outer.named("stream")
    return streams[0].ns / 1e9 / (output_tokens - 1) if streams and output_tokens > 1 else None


def _token_times(seen: _RequestRows) -> list[float]:
    """Seconds between tokens: those of `verbose` traces.

    After a first token from before the trace, there were others that nobody saw.
    """
    ends = [span.end for span in seen.outer.named("token")]
    if ends:
        began = _traced_from(seen.process, seen.outer)
        ends[:0] = [it.end for it in seen.outer.named("first token") if it.end >= began]
    return [(later - earlier) / 1e9 for earlier, later in pairwise(ends)]


def _shared(own: Sequence[Step], seen: _RequestRows) -> tuple[int, float]:
    """Prompt tokens of others in the steps that gave this request a token, and the seconds of these steps."""
    rows = {(process.pid, row.tid) for process, row in seen.engines}
    num_tokens, ns = 0, 0
    for step in own:
        counts = list(zip(step.args.rows, step.args.tokens, strict=False))
        pid = step.place.pid
        if any((pid, row) in rows and count > 1 for row, count in counts):
            continue
        prompts = sum(count for row, count in counts if (pid, row) not in rows and count > 1)
        if prompts:
            num_tokens += prompts
            ns += step.place.span.ns
    return num_tokens, ns / 1e9


_NOTABLE = 0.1
"""Share of the request's time."""
_INTERRUPTIONS = (("preempted", "preempted {}"), ("recovering", "a worker was lost {}"))
_KINDS = tuple(name for name, _ in _INTERRUPTIONS)
_TIMES = {1: "once", 2: "twice"}


def _reasons(
    request: RequestReport, shared: tuple[int, float], num_decoded: int
) -> Iterator[tuple[float, str]]:
    """Seconds and sentence of each reason; there is always one: at least, the length of the answer.

    `shared` is what `_shared` returns, `num_decoded` what `_num_decoded` returns.
    """
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
    again = sum(again for name in _KINDS for _, again in _interruption_times(request, name))
    prefill = took["prefill"] - again
    if prefill > notable:
        computed = request.prompt_tokens - request.cached_tokens
        yield prefill, f"{computed:,} prompt tokens took {seconds(prefill)} to compute"
    if request.write > notable:
        yield request.write, f"the client took {seconds(request.write)} to take the answer"
    num_tokens, in_shared = shared
    if in_shared > notable:
        sentence = f"shared steps of {seconds(in_shared)} with prompts of {num_tokens:,} tokens"
        yield in_shared, sentence
    if took["decode"] > notable or not any(took.values()):
        each = took["decode"] / max(1, num_decoded or request.output_tokens - 1)
        is_cut = num_decoded and (took["before the trace"] or took["after the trace"])
        count = num_decoded if is_cut else request.output_tokens
        yield took["decode"], f"{count:,} tokens took {seconds(each)} each"


def _interruptions(request: RequestReport) -> Iterator[tuple[float, str]]:
    """Interruptions are listed however short they were."""
    for name, told in _INTERRUPTIONS:
        found = [*_interruption_times(request, name)]
        if not found:
            continue
        count = (request.preemptions if name == "preempted" else 0) or len(found)
        waited, again = map(sum, zip(*found, strict=True))
        sentence = told.format(_TIMES.get(count, f"{count} times"))
        yield (
            waited + again,
            f"{sentence}: {seconds(waited)} until it ran again, {seconds(again)} to compute again",
        )


def _interruption_times(request: RequestReport, name: str) -> Iterator[tuple[float, float]]:
    """Seconds until the request ran again, and of computing again what was there, for each wait that began so.

    On its way back a request may wait for its KV, and then in the queue again.
    """
    runs = [
        [*phases]
        for _, phases in groupby(request.phases, key=lambda it: it.name in ("prefill", "decode"))
    ]
    for run, after in zip_longest(runs, runs[1:]):
        kind = next((it.name for it in run if it.name in _KINDS), None)
        if kind == name:
            waits = dropwhile(lambda it: it.name != name, run)
            is_prefill = after is not None and after[0].name == "prefill"
            yield sum(it.seconds for it in waits), after[0].seconds if is_prefill else 0.0
