# SPDX-License-Identifier: Apache-2.0
"""A trace of real requests over simulated hosts, by each policy (`python -m benchmarks.trace_replay FILE`).

The trace has a line of JSON for each request: `timestamp` in milliseconds, `input_length` and `output_length` in
tokens, and `hash_ids`, one for each 512 tokens of the prompt; equal ids at the beginning are a shared prefix. That
is the format published with Mooncake (Qin et al., FAST 2025). Tokens are made up, the same for the same id.

Dispatcher, scheduler and KV cache are the real ones, in virtual time with the cost model of `benchmarks.routing`.
What a policy can reach is what one host finds that has the caches of all of them, and their speed.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path

import msgspec

from benchmarks.routing import Outcome, Timed, replica, serve
from pagoda.cli import output
from pagoda.fleet.policies import PolicyName
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams

BLOCK_SIZE = 512
_POLICIES: tuple[PolicyName, ...] = ("round-robin", "least-pending-tokens", "prefix-affinity")
_VOCABULARY = 2**30


class TracedRequest(msgspec.Struct, frozen=True):
    """One line of a trace."""

    timestamp: int
    """Milliseconds since its beginning."""
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, count: int, skip: int = 0) -> list[TracedRequest]:
    """`count` requests behind the first `skip`."""
    decode = msgspec.json.Decoder(TracedRequest).decode
    with path.open("rb") as lines:
        return [decode(line) for line in islice(lines, skip, skip + count)]


def as_traffic(trace: Sequence[TracedRequest], speed: float) -> Iterator[Timed]:
    """`speed` times as fast as they came."""
    first = trace[0].timestamp
    for index, traced in enumerate(trace):
        tokens = [token for hash_id in traced.hash_ids for token in block_tokens(hash_id)]
        request = GenerateRequest(
            request_id=f"r{index}",
            prompt_token_ids=tokens[: traced.input_length],
            work=Work(SamplingParams(seed=index, max_tokens=max(1, traced.output_length))),
        )
        yield Timed((traced.timestamp - first) / 1000 / speed, request)


@cache
def block_tokens(hash_id: int) -> list[int]:
    """The tokens that stand for a block of the trace."""
    rng = random.Random(hash_id)
    return [rng.randrange(_VOCABULARY) for _ in range(BLOCK_SIZE)]


def host(num_blocks: int, speed: float = 1.0) -> EngineConfig:
    """A replica of `benchmarks.routing`, `speed` times as fast, with blocks as large as the trace's."""
    engine = replica()
    sim = msgspec.structs.replace(
        engine.sim,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        base_s=engine.sim.base_s / speed,
        per_token_s=engine.sim.per_token_s / speed,
    )
    return msgspec.structs.replace(engine, sim=sim, max_num_seqs=max(256, int(256 * speed)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="a file of JSON lines")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--requests", type=int, default=3000, help="how many of them")
    parser.add_argument("--skip", type=int, default=0, help="how many come before these")
    parser.add_argument("--speed", type=float, default=2.0, help="how much faster they come")
    parser.add_argument("--blocks", type=int, default=1000, help="of 512 tokens, on each host")
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace, arguments.requests, arguments.skip)
    count: int = arguments.hosts

    def outcome(policy: PolicyName, hosts: int, engine: EngineConfig) -> Outcome:
        return serve(list(as_traffic(trace, arguments.speed)), policy, hosts, engine)

    whole = outcome("round-robin", 1, host(count * arguments.blocks, speed=count))
    rows = [_row(f"one host as large as {count}", whole, whole)]
    rows += [
        _row(policy, outcome(policy, count, host(arguments.blocks)), whole) for policy in _POLICIES
    ]
    columns = ("", "hit rate", "of one host", "TTFT p50", "TTFT p99")
    title = f"{len(trace)} requests over {count} hosts of {arguments.blocks} blocks"
    output.stdout().print(output.table(title, columns, rows))


def _row(name: str, run: Outcome, whole: Outcome) -> tuple[str, ...]:
    return (
        name,
        f"{run.hit_rate:.1%}",
        f"{run.hit_rate / whole.hit_rate:.2f}",
        f"{run.ttft(0.5):.2f} s",
        f"{run.ttft(0.99):.2f} s",
    )


if __name__ == "__main__":
    main()
