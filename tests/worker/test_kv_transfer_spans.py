"""Transfers in a trace: those under way together do not share a row."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from pagoda.messages.transfers import (
    DeviceBlocks,
    DiskObjects,
    HostSlots,
    RemoteBlocks,
    Transfer,
    TransferEnd,
)
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession
from pagoda.worker.kv.transfer_spans import TransferSpans

STORE = Transfer(1, 0, DeviceBlocks([4, 5]), HostSlots([0, 1]))
LOAD = Transfer(2, 0, DiskObjects([b"key"]), DeviceBlocks([6]))
FETCH = Transfer(3, 0, RemoteBlocks("peer", [9]), DeviceBlocks([7]))


class _Trace:
    def __init__(self, directory: Path) -> None:
        ticks = itertools.count(1000, 1000)
        self._directory = directory
        self.tracer = Tracer("worker", clock_ns=lambda: next(ticks))
        self.spans = TransferSpans(self.tracer, 100)

    def start(self) -> None:
        session = TraceSession(level=TraceLevel.E2E, directory=str(self._directory), run="run")
        self.tracer.start(session)

    def events(self) -> list[dict[str, Any]]:
        self.tracer.stop()
        (fragment,) = self._directory.iterdir()
        return [json.loads(line) for line in fragment.read_bytes().splitlines()]


def test_each_transfer_is_a_span(tmp_path: Path) -> None:
    trace = _Trace(tmp_path)
    trace.start()
    trace.spans.begin([STORE, LOAD])
    trace.spans.end(TransferEnd(1, 0))
    trace.spans.begin([FETCH])
    trace.spans.end(TransferEnd(3, 0, [0], "it is gone"))
    trace.spans.end(TransferEnd(2, 0))
    events = trace.events()
    rows = [e["tid"] for e in events if e.get("ph") == "M" and e["args"]["name"] == "kv transfers"]
    assert len(rows) == 2
    spans = [e for e in events if e.get("ph") == "X"]
    assert [(span["tid"], span["args"]) for span in spans] == [
        (rows[0], {"blocks": 2, "source": "device", "target": "host", "bytes": 200}),
        (rows[0], {"blocks": 1, "source": "remote", "target": "device", "bytes": 100, "failed": 1}),
        (rows[1], {"blocks": 1, "source": "disk", "target": "device", "bytes": 100}),
    ]
    first, second, beside = ((span["ts"], span["ts"] + span["dur"]) for span in spans)
    assert first[1] < second[0]  # in a row that was free again
    assert beside[0] == first[0]
    assert beside[1] > second[1]


def test_transfers_that_began_before_are_left_out(tmp_path: Path) -> None:
    trace = _Trace(tmp_path)
    trace.spans.begin([STORE])
    trace.start()
    trace.spans.end(TransferEnd(1, 0))
    assert [e for e in trace.events() if e.get("ph") == "X"] == []
