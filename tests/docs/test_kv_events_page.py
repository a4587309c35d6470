# SPDX-License-Identifier: Apache-2.0
"""The subscriber in docs/kv-events.md, run beside an engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from ports import free_ports

from pagoda.llm.llm import LLM

ROOT = Path(__file__).parents[2]


def test_the_subscriber_tells_what_happened() -> None:
    page = (ROOT / "docs" / "kv-events.md").read_text(encoding="utf-8")
    [program] = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    port = free_ports(2)[0]
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
