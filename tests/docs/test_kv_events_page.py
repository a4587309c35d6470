"""The subscriber in docs/kv-events.md, run beside an engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import zmq

from pagoda.frontend.llm import LLM

ROOT = Path(__file__).parents[2]


def test_the_subscriber_tells_what_happened() -> None:
    page = (ROOT / "docs" / "kv-events.md").read_text(encoding="utf-8")
    [program] = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    port = _two_free_ports()
    program = program.replace("5557", str(port)).replace("5558", str(port + 1))
    sizes = {"num_kv_blocks": 64, "block_size": 4, "max_model_len": 64}
    with LLM(executor="sim", kv_events=f"tcp://127.0.0.1:{port}", **sizes) as llm:
        llm.generate({"prompt_token_ids": list(range(100, 117))})
        subscriber = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        )
        try:
            assert subscriber.stdout is not None
            lines = [subscriber.stdout.readline().split() for _ in range(2)]
        finally:
            subscriber.kill()
            subscriber.communicate()
    assert [line[1:3] for line in lines] == [["0", "AllBlocksCleared"], ["0", "BlockStored"]]
    assert int(lines[0][0]) + 1 == int(lines[1][0])


def _two_free_ports() -> int:
    context = zmq.Context()
    try:
        while True:
            sockets = [context.socket(zmq.PUB) for _ in range(2)]
            try:
                port = sockets[0].bind_to_random_port("tcp://127.0.0.1", 20_000, 30_000)
                sockets[1].bind(f"tcp://127.0.0.1:{port + 1}")
                return port
            except zmq.ZMQError:
                continue
            finally:
                for socket in sockets:
                    socket.close(linger=0)
    finally:
        context.term()
