"""CPU time of a server that has nothing to do."""

from __future__ import annotations

import asyncio

from benchmarks.chaos.trial import Outcome, Trial
from benchmarks.idle import cpu_share
from benchmarks.start_up import ask_once
from pagoda.cli.server_process import server_process

_LARGEST_SHARE = 0.003


def _run(short: bool) -> Outcome:
    with server_process([]) as server:
        asyncio.run(ask_once(server))
        share = cpu_share(server.pid, 5 if short else 30)
    return Outcome(f"{100 * share:.2f} % of a core, all processes", share <= _LARGEST_SHARE)


IDLE = Trial(
    "idle", "nothing, after one request", "all processes together use at most 0.3 % of a core", _run
)
