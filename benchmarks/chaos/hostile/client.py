# SPDX-License-Identifier: Apache-2.0
"""The hostile client, a process of its own: `python -m benchmarks.chaos.hostile.client URL [--short] [NAME...]`.

Prints a line of JSON for each attack: its name, when it began and ended by `time.monotonic`, and what was wrong
with the answer, or nothing. The first attack is none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import aiohttp

from benchmarks.chaos.hostile.attack import Attack, Siege
from benchmarks.chaos.hostile.constraints import constraints
from benchmarks.chaos.hostile.sieges import sieges
from benchmarks.chaos.hostile.values import values
from pagoda.concurrency.event_loop import run

NOTHING = "nothing"
_QUIET_S, _SHORT_QUIET_S = 10.0, 0.5
_PAUSE_S = 0.2
_LIMIT_S = 30
_SHORT = (
    "wide patterns",
    "catastrophic",
    "n, 1",
    "deep",
    "lists",
    "surrogate",
    "TLS",
    "noise",
    "two lengths",
)


def attacks() -> Iterator[Attack | Siege]:
    yield from constraints()
    yield from values()
    yield from sieges()


async def _send(session: aiohttp.ClientSession, attack: Attack) -> str:
    """Fault of the answer; empty if it is right."""
    headers = {"Content-Type": "application/json", **attack.headers}
    try:
        async with session.post(attack.path, data=attack.body, headers=headers) as answer:
            text = await answer.text()
            if answer.status not in attack.statuses:
                return f"status {answer.status}: {text[:80]}"
    except TimeoutError:
        return f"no answer within {_LIMIT_S} s"
    except aiohttp.ClientError as error:
        # A server may hang up on a body or a header that is far too large, before all of it was sent.
        is_large = 413 in attack.statuses or 431 in attack.statuses
        return "" if is_large else f"{type(error).__name__}: {error}"[:80]
    return ""


async def _attack(url: str, names: Sequence[str], *, short: bool) -> None:
    place = urlsplit(url)
    limit = aiohttp.ClientTimeout(_LIMIT_S)
    began = time.monotonic()
    await asyncio.sleep(_SHORT_QUIET_S if short else _QUIET_S)
    _tell(NOTHING, began, time.monotonic(), "")
    async with aiohttp.ClientSession(url, timeout=limit) as session:
        for attack in attacks():
            if names and not any(name in attack.name for name in names):
                continue
            await asyncio.sleep(_PAUSE_S)
            began = time.monotonic()
            if isinstance(attack, Attack):
                wrong = await _send(session, attack)
            else:
                wrong = await attack.run(place.hostname or "", place.port or 80)
            _tell(attack.name, began, time.monotonic(), wrong)


def _tell(name: str, began: float, ended: float, wrong: str) -> None:
    print(json.dumps((name, began, ended, wrong)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--short", action="store_true", help="a few cheap attacks")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    run(_attack(options.url, _SHORT if options.short else options.names, short=options.short))


if __name__ == "__main__":
    main()
