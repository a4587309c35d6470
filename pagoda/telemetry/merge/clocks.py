"""One time line for all processes, from offsets that pairs of them have measured between their clocks."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pagoda.telemetry.fragments import ProcessHeader
from pagoda.telemetry.merge.model import ClockSource
from pagoda.telemetry.merge.reading import ClockEdge

_Graph = Mapping[str, Mapping[str, ClockEdge]]
"""The best measurement between two clocks, both ways."""


@dataclass(frozen=True)
class Shift:
    """Nanoseconds to add to a process's own time to get the trace's."""

    ns: int
    source: ClockSource


def find_shifts(
    processes: Sequence[ProcessHeader], edges: Mapping[str, Iterable[ClockEdge]]
) -> dict[str, Shift]:
    """The shift of each process, by `uid`.

    The clock of the first process is the trace's. Measured offsets lead from there to other clocks, over as few
    measurements as possible; between two clocks the one with the shortest round trip counts. Processes with the
    same `clock_id` share a clock. A clock to which no measurement leads is placed by the time of day.
    """
    clocks = {process.uid: process.clock_id or process.uid for process in processes}
    graph = _graph(edges, clocks)
    main = processes[0]
    shifts: dict[str, Shift] = {}
    for process in processes:
        if clocks[process.uid] in shifts:
            continue
        if process is main:
            shift = Shift(0, "main")
        else:
            shift = Shift(_ahead_of_wall(main) - _ahead_of_wall(process), "wall")
        _spread(clocks[process.uid], shift, graph, shifts)
    return {uid: shifts[clock] for uid, clock in clocks.items()}


def _ahead_of_wall(process: ProcessHeader) -> int:
    return process.clock_ns - process.wall_ns


def _graph(edges: Mapping[str, Iterable[ClockEdge]], clocks: Mapping[str, str]) -> _Graph:
    graph: defaultdict[str, dict[str, ClockEdge]] = defaultdict(dict)
    for uid, measured in edges.items():
        own = clocks[uid]
        for edge in measured:
            peer = clocks.get(edge.peer, edge.peer)
            best = graph[own].get(peer)
            if best is None or edge.round_trip_ns < best.round_trip_ns:
                graph[own][peer] = ClockEdge(peer, edge.offset_ns, edge.round_trip_ns)
                graph[peer][own] = ClockEdge(own, -edge.offset_ns, edge.round_trip_ns)
    return graph


def _spread(start: str, shift: Shift, graph: _Graph, shifts: dict[str, Shift]) -> None:
    """Adds the shifts of all clocks that measurements lead to, breadth first."""
    shifts[start] = shift
    source: ClockSource = "wall" if shift.source == "wall" else "measured"
    queue = deque([start])
    while queue:
        clock = queue.popleft()
        for peer, edge in graph.get(clock, {}).items():
            if peer not in shifts:
                shifts[peer] = Shift(shifts[clock].ns - edge.offset_ns, source)
                queue.append(peer)
