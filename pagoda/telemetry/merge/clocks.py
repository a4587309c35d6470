"""One clock for all processes, from offsets that pairs of them have measured."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pagoda.telemetry.fragments import ProcessHeader
from pagoda.telemetry.merge.model import ClockSource
from pagoda.telemetry.merge.reading import ClockEdge

_Graph = Mapping[str, Mapping[str, ClockEdge]]


@dataclass(frozen=True)
class Shift:
    """What to add to a process's own time to get the trace's."""

    ns: int
    source: ClockSource


def find_shifts(
    processes: Sequence[ProcessHeader], edges: Mapping[str, Iterable[ClockEdge]]
) -> dict[str, Shift]:
    """The shift of each process, by `uid`.

    The clock of the first process is the trace's. From there on measured offsets lead to others, over as few of
    them as can be; between two processes the one with the shortest round trip counts. Where none leads to is
    placed by the time of day that both sides wrote down: clocks of one host are not taken to be the same.
    """
    graph = _graph(edges)
    main = processes[0]
    shifts: dict[str, Shift] = {}
    for process in processes:
        if process.uid in shifts:
            continue
        if process is main:
            shift = Shift(0, "main")
        else:
            shift = Shift(_ahead_of_wall(main) - _ahead_of_wall(process), "wall")
        _spread(process.uid, shift, graph, shifts)
    return shifts


def _ahead_of_wall(process: ProcessHeader) -> int:
    return process.clock_ns - process.wall_ns


def _graph(edges: Mapping[str, Iterable[ClockEdge]]) -> _Graph:
    """Both ways of the best measurement of each pair."""
    graph: defaultdict[str, dict[str, ClockEdge]] = defaultdict(dict)
    for uid, measured in edges.items():
        for edge in measured:
            best = graph[uid].get(edge.peer)
            if best is None or edge.round_trip_ns < best.round_trip_ns:
                graph[uid][edge.peer] = edge
                graph[edge.peer][uid] = ClockEdge(uid, -edge.offset_ns, edge.round_trip_ns)
    return graph


def _spread(start: str, shift: Shift, graph: _Graph, shifts: dict[str, Shift]) -> None:
    """Breadth first. Who left no fragment still leads on to others."""
    shifts[start] = shift
    source: ClockSource = "wall" if shift.source == "wall" else "measured"
    queue = deque([start])
    while queue:
        uid = queue.popleft()
        for peer, edge in graph.get(uid, {}).items():
            if peer not in shifts:
                shifts[peer] = Shift(shifts[uid].ns - edge.offset_ns, source)
                queue.append(peer)
