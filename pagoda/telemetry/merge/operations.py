"""The operations of a forward pass, which a worker writes as bare durations, as spans."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pagoda.telemetry.merge.model import Process, Row, Span, arguments, read_args


class _Durations(msgspec.Struct):
    ops_ns: list[int] = []


class Operations(msgspec.Struct, frozen=True):
    """A worker's description of the operations of its forward pass; each list has an entry for each operation."""

    names: list[str]
    kinds: list[str] = []
    weight_bytes: list[float] = []
    flops_per_token: list[float] = []

    def name(self, index: int) -> str:
        return self.names[index] if index < len(self.names) else f"operation {index}"

    def kind(self, index: int) -> str:
        return self.kinds[index] if index < len(self.kinds) else "operation"


def operations_of(process: Process) -> Operations:
    """The operations that the process has described; none if it has not."""
    return process.description("forward_ops", Operations) or Operations([])


def operation_spans(forward: Span, operations: Operations) -> Iterator[tuple[Span, str]]:
    """The operations of one forward pass, one after the other from its start, each with its kind."""
    durations = read_args(forward.args, _Durations) or _Durations()
    at = forward.start
    for index, ns in enumerate(durations.ops_ns):
        end = min(at + max(0, ns), forward.end)
        yield Span(at, end, operations.name(index), b""), operations.kind(index)
        at = end


def operations_within(
    row: Row, index: int, operations: Operations
) -> Iterator[tuple[str, str, int]]:
    """Name, kind and nanoseconds of each operation of the forward pass that is the span at `index`.

    They are in what is said of it, or are spans within it.
    """
    forward = row.spans[index]
    if b'"ops_ns"' in forward.args:
        for span, kind in operation_spans(forward, operations):
            yield span.name, kind, span.end - span.start
        return
    kinds = dict(zip(operations.names, operations.kinds, strict=False))
    for position in range(index + 1, len(row.spans)):
        span = row.spans[position]
        if span.start >= forward.end:
            return
        kind = kinds.get(span.name) or str(arguments(span.args).get("kind", "operation"))
        yield span.name, kind, span.end - span.start
