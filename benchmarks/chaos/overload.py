# SPDX-License-Identifier: Apache-2.0
"""Twenty times as much load as a server can serve, nearly all of it from one API key."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import msgspec

from benchmarks.chaos.overload_load import Clients, Load, Received
from benchmarks.chaos.trial import Outcome, Trial
from pagoda.cli.server_process import server_process

_OVERLOAD = 20
_LEAST_GOODPUT = 0.95
_MOST_TTFT = 2.0
_HEAVY = "heavy-key"
_LIGHT = tuple(f"light-key-{number}" for number in range(5))
_LIGHT_RATE = 0.4
"""Requests per second of each light key: together a fifth of what the server can serve."""
_NUM_PROMPT_TOKENS = 32
_NUM_OUTPUT_TOKENS = 64


def _run(short: bool) -> Outcome:
    seconds, num_seqs, step_ms = (1.5, 4, 5) if short else (60.0, 32, 50)
    flags = (
        *("--log-level", "warning", "--executor", "sim", "--sim-base-ms", str(step_ms)),
        *("--max-num-seqs", str(num_seqs), "--max-num-waiting", str(2 * num_seqs)),
        *(part for key in (_HEAVY, *_LIGHT) for part in ("--api-key", f"{key}:={key}")),
    )
    with server_process(flags) as server:
        url = server.base_url
        closed = _load(url, seconds / 4, Clients(_HEAVY, num_clients=2 * num_seqs))
        most = closed.num_tokens / (seconds / 4)
        light = [Clients(key, rate=_LIGHT_RATE) for key in _LIGHT]
        unloaded = _load(url, seconds / 2, *light)
        rate = _OVERLOAD * most / _NUM_OUTPUT_TOKENS - sum(one.rate for one in light)
        loaded = _load(url, seconds, Clients(_HEAVY, rate=rate), *light)
    return outcome_of(most, seconds, unloaded, loaded)


def outcome_of(most: float, seconds: float, unloaded: Received, loaded: Received) -> Outcome:
    """Judges the received answers; `most` is the unloaded maximum in tokens per second."""
    goodput = loaded.num_tokens / seconds / most if most else 0.0
    before_s, then_s = _p99(unloaded), _p99(loaded)
    every = _refused(loaded, tuple(loaded.statuses))
    of_light = sum(_refused(loaded, _LIGHT).values())
    told = ", ".join(f"{count} × {status}" for status, count in sorted(every.items()))
    num_requests = sum(map(sum, (counts.values() for counts in loaded.statuses.values())))
    measured = (
        f"goodput {goodput:.3f} of {most:.0f} tokens/s; of {num_requests} requests "
        f"{loaded.num_complete} complete, {loaded.num_incomplete} cut, refused {told or 'none'}, of light keys "
        f"{of_light}; "
        f"p99 TTFT of light keys {1e3 * then_s:.0f} ms, unloaded {1e3 * before_s:.0f} ms; "
        f"load late by {1e3 * loaded.late_s:.0f} ms at most"
    )
    holds = (
        goodput >= _LEAST_GOODPUT
        and then_s <= _MOST_TTFT * before_s
        and set(every) <= {408, 429}
        and not of_light
        and not _refused(unloaded, _LIGHT)
        and all(loaded.ttft_s.get(key) for key in _LIGHT)
        and not loaded.num_incomplete
        and not loaded.num_without_retry_after
    )
    return Outcome(measured, holds)


def _refused(received: Received, keys: Sequence[str]) -> Counter[int]:
    """Counts of answers to these keys by status, other than 200."""
    counts = sum((Counter(received.statuses.get(key, {})) for key in keys), Counter[int]())
    del counts[200]
    return counts


def _load(url: str, seconds: float, *clients: Clients) -> Received:
    load = Load(url, seconds, list(clients), _NUM_PROMPT_TOKENS, _NUM_OUTPUT_TOKENS)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos.overload_load"],
        input=msgspec.json.encode(load),
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.json.decode(done.stdout, type=Received)


def _p99(received: Received) -> float:
    """Seconds in which 99 % of the light keys' first tokens came; infinite if none came."""
    times = sorted(s for key in _LIGHT for s in received.ttft_s.get(key, ()))
    return times[min(len(times) - 1, int(0.99 * len(times)))] if times else math.inf


OVERLOAD = Trial(
    "overload",
    f"{_OVERLOAD} × overload for 60 s, one key heavy and five light",
    f"goodput at least {_LEAST_GOODPUT} of the unloaded maximum; every refusal a 429 or 408, none of a light key "
    f"(these send a fifth of what the server can serve); their p99 TTFT at most {_MOST_TTFT:g} × the unloaded one",
    _run,
)
