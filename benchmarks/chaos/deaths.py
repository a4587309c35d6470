# SPDX-License-Identifier: Apache-2.0
"""Workers and engines that are killed, stopped, hang, or run out of memory while streams of all kinds run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from functools import cache, partial

from benchmarks.chaos.streams import (
    RESPAWN_S,
    Stream,
    adapted_server,
    bodies,
    comparison,
    run_streams,
    signal_children,
)
from benchmarks.chaos.trial import Outcome, Trial

_WORKER, _ENGINE = "pagoda.worker.main", "pagoda.engine.main"
_STEP_TIMEOUT_S = 5.0
_ENGINE_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 10.0
_KINDS = "greedy, seeded, held to a schema, of an adapter"
_NUM_STREAMS, _NUM_FAULTS = 200, 20
_SHORT_STREAMS, _SHORT_TOKENS = 8, 60


@cache
def _undisturbed(count: int, max_tokens: int) -> list[Stream]:
    with adapted_server() as server:
        return asyncio.run(run_streams(server, bodies(count, max_tokens)))


def _signals(
    short: bool,
    *,
    module: str,
    number: int,
    times: int,
    timeout_s: float = 0.0,
    flags: Sequence[str] = (),
    faults: str = "",
    count: int = _NUM_STREAMS,
    max_tokens: int = 600,
) -> Outcome:
    """Compares streams of a server whose processes are sent signals with undisturbed ones. A pause may last
    `timeout_s`, and a process may start in it."""
    if short:
        count, times, max_tokens = _SHORT_STREAMS, 1, _SHORT_TOKENS
    expected = _undisturbed(count, max_tokens)
    with adapted_server(flags, faults) as server:
        disturb = partial(signal_children, server, module, number, times)
        streams = asyncio.run(run_streams(server, bodies(count, max_tokens), disturb))
    return comparison(streams, expected, None if short else timeout_s + RESPAWN_S)


def _asked(timeout_s: float, timeout: str = "") -> str:
    within = f"the time-out of {timeout_s:g} s ({timeout}) + " if timeout else ""
    return f"all complete, token for token; no pause longer than {within}{RESPAWN_S:g} s"


_COUNTS = f"during {_NUM_STREAMS} streams ({_KINDS})"
KILL_WORKER = Trial(
    "kill-worker",
    f"SIGKILL of the worker, {_NUM_FAULTS} times {_COUNTS}",
    _asked(0),
    partial(_signals, module=_WORKER, number=signal.SIGKILL, times=_NUM_FAULTS),
)
KILL_ENGINE = Trial(
    "kill-engine",
    f"SIGKILL of the engine, {_NUM_FAULTS} times {_COUNTS}",
    _asked(0),
    partial(_signals, module=_ENGINE, number=signal.SIGKILL, times=_NUM_FAULTS),
)
STOP_WORKER = Trial(
    "stop-worker",
    f"SIGSTOP of the worker, 3 times {_COUNTS}",
    _asked(_STEP_TIMEOUT_S, "--step-timeout"),
    partial(
        _signals,
        module=_WORKER,
        number=signal.SIGSTOP,
        times=3,
        timeout_s=_STEP_TIMEOUT_S,
        flags=("--step-timeout", f"{_STEP_TIMEOUT_S:g}"),
    ),
)
STOP_ENGINE = Trial(
    "stop-engine",
    f"SIGSTOP of the engine, 3 times {_COUNTS}",
    _asked(_ENGINE_TIMEOUT_S, "--engine-timeout"),
    partial(
        _signals,
        module=_ENGINE,
        number=signal.SIGSTOP,
        times=3,
        timeout_s=_ENGINE_TIMEOUT_S,
        flags=("--engine-timeout", f"{_ENGINE_TIMEOUT_S:g}"),
    ),
)
HANG_LOADING = Trial(
    "hang-loading",
    f"SIGKILL of the worker {_COUNTS}; the one that follows hangs while it loads",
    _asked(_START_TIMEOUT_S, "--worker-start-timeout"),
    partial(
        _signals,
        module=_WORKER,
        number=signal.SIGKILL,
        times=1,
        timeout_s=_START_TIMEOUT_S,
        flags=("--worker-start-timeout", f"{_START_TIMEOUT_S:g}"),
        faults="worker[2].load:hang@3",
    ),
)


def _out_of_memory(short: bool) -> Outcome:
    count, max_tokens = (_SHORT_STREAMS, _SHORT_TOKENS) if short else (16, 400)
    expected = _undisturbed(count, max_tokens)
    faults = "worker.logits:oom@20 worker[1].step:kill@30 worker[2].step:oom@20"
    with adapted_server(faults=faults) as server:
        streams = asyncio.run(run_streams(server, bodies(count, max_tokens)))
    return comparison(streams, expected, None if short else RESPAWN_S)


OOM = Trial(
    "oom",
    "16 streams; the worker is killed by SIGKILL as the kernel does when memory runs out, and memory cannot be "
    "allocated in a step and in sampling",
    _asked(0),
    _out_of_memory,
)

_LOSSES = (
    "worker[1].result:reorder@20",
    "frontend.send:double@7",
    "worker[1].result:double@20",
    "worker[1].result:drop@20",
    "engine[1].plan:double@20",
    "engine[1].plan:drop@20",
    "engine[1].result:reorder@20",
    "frontend.receive:double@60",
)


def _lost_messages(short: bool) -> Outcome:
    count, max_tokens = (_SHORT_STREAMS, _SHORT_TOKENS) if short else (50, 200)
    expected = _undisturbed(count, max_tokens)
    flags = ("--step-timeout", f"{_STEP_TIMEOUT_S:g}", "--engine-timeout", f"{_ENGINE_TIMEOUT_S:g}")
    told, holds = [], True
    for fault in _LOSSES[:2] if short else _LOSSES:
        with adapted_server(flags, fault) as server:
            streams = asyncio.run(run_streams(server, bodies(count, max_tokens)))
        outcome = comparison(streams, expected, None if short else _STEP_TIMEOUT_S + RESPAWN_S)
        told.append(f"{fault}: {outcome.measured}")
        holds = holds and outcome.holds
    return Outcome("; ".join(told), holds)


LOST_MESSAGES = Trial(
    "lost-messages",
    "plans, results and messages between frontend and engine that are lost, come twice or out of turn, while 50 "
    "streams run (a server each)",
    _asked(_STEP_TIMEOUT_S, "--step-timeout"),
    _lost_messages,
)

_POISON_STEP_TIMEOUT_S = 3.0
_POISONS = {
    "raises": "worker.logits:raise~poison",
    "NaN": "worker.logits:nan~poison",
    "kills": "worker.logits:crash~poison",
    "never ends": "worker.logits:hang~poison",
}


def _poison(short: bool) -> Outcome:
    count, max_tokens = (_SHORT_STREAMS, _SHORT_TOKENS) if short else (50, 200)
    kinds = ["NaN"] if short else list(_POISONS)
    expected = _undisturbed(count, max_tokens)
    told, holds = [], True
    for kind in kinds:
        flags = ("--step-timeout", f"{_POISON_STEP_TIMEOUT_S:g}")
        with adapted_server(flags, _POISONS[kind]) as server:
            requests = bodies(count, max_tokens)
            streams = asyncio.run(run_streams(server, requests, poisoned=count // 2))
        good = [it for index, it in enumerate(streams) if index != count // 2]
        wanted = [it for index, it in enumerate(expected) if index != count // 2]
        # Together twice and alone twice; of steps that take too long, once each.
        limit_s = max(4 * RESPAWN_S, 2 * (_POISON_STEP_TIMEOUT_S + RESPAWN_S))
        outcome = comparison(good, wanted, None if short else limit_s)
        errors = len(streams[count // 2].errors)
        told.append(f"{kind}: {outcome.measured}, {errors} error")
        holds = holds and outcome.holds and errors == 1
    return Outcome("; ".join(told), holds)


POISON = Trial(
    "poison",
    "one poisoned request among 50: it raises, computes NaN, kills the worker, never ends (a server each)",
    f"49 complete, token for token, the one has 1 error object; no pause longer than {4 * RESPAWN_S:g} s "
    f"(four workers, or two and two times --step-timeout, {_POISON_STEP_TIMEOUT_S:g} s)",
    _poison,
)
