# SPDX-License-Identifier: Apache-2.0
"""One stream through llama.cpp's Python API: prefill, then decode. Runs in an environment of its own.

`python llama_stream.py FILE --threads N --input-len N --output-len N --requests N` with a Python that has
llama-cpp-python. Prints a line of JSON: seconds until the model is loaded, and of each request to the first token
and from there to the last.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

_START = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    for name in ("threads", "input-len", "output-len", "requests"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()

    from llama_cpp import Llama

    model = Llama(
        str(options.file),
        n_ctx=options.input_len + options.output_len,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        verbose=False,
    )
    ready_s = time.perf_counter() - _START
    requests = [
        _request(model, options.input_len, options.output_len) for _ in range(options.requests + 1)
    ]
    json.dump(
        {
            "ready_s": ready_s,
            "requests": requests[1:],  # the first warms up
            "resident_bytes": _resident_bytes(),
        },
        sys.stdout,
    )


def _request(model: Any, input_len: int, output_len: int) -> tuple[float, float]:
    prompt = random.choices(range(3, 256), k=input_len)
    model.reset()
    start = time.perf_counter()
    model.eval(prompt)
    token = model.sample()
    first = time.perf_counter()
    for _ in range(output_len - 1):
        model.eval([token])
        token = model.sample()
    return first - start, time.perf_counter() - first


def _resident_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    line = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
