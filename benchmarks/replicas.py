# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.replicas`: the embedded model over two replicas of one thread, beside one of two threads.

Its weights fit into the processor's caches, so that replicas cost no bandwidth; what is measured is what a second
engine, smaller batches and the dispatcher cost, against what threads of one worker lose by waiting for each other.
"""

from __future__ import annotations

from pagoda.cli.server_process import server_process
from pagoda.plugins.bench.compare import CompareOptions, compare


def main() -> int:
    """Prints the table of `pagoda bench compare`; the second server is the one with replicas."""
    load = CompareOptions(
        concurrency="16", input_len=64, output_len=128, num_prompts=64, repeats=5, num_warmups=16
    )
    quiet = ["--log-level", "warning"]
    with (
        server_process(["--threads", "2", *quiet]) as one,
        server_process(["--data-parallel-size", "2", "--threads", "1", *quiet]) as two,
    ):
        return compare(base_url=(one.base_url, two.base_url), load=load)


if __name__ == "__main__":
    raise SystemExit(main())
