# SPDX-License-Identifier: Apache-2.0
"""Traces that a router begins at its hosts: each traces with its processes, and gives the router its fragments.

A fragment may be long, so the router asks for it part by part.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from pagoda.concurrency.async_utils import beside
from pagoda.errors import PagodaError
from pagoda.files import open_private
from pagoda.fleet.fleet import TraceOwner
from pagoda.messages.ranges import MAX_ITEMS
from pagoda.messages.tracing import (
    MAX_FRAGMENTS,
    MAX_PART_BYTES,
    FetchFragment,
    FragmentPart,
    HostTraceStopped,
    StartTrace,
    StopTrace,
)
from pagoda.plugins.router.messages import RouterMessage
from pagoda.telemetry.fragments import FRAGMENT_SUFFIX, MAX_FRAGMENT_BYTES, fragments_of, run_prefix
from pagoda.telemetry.tracer import TraceLevel

T = TypeVar("T")

_STOP_S = 120.0
"""Seconds in which a host, and all hosts of a router, must have closed their fragments."""
_PART_S = 30.0
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.\-]{{0,250}}{re.escape(FRAGMENT_SUFFIX)}")


class HostTrace:
    """The host's end: a trace of this server for one router."""

    def __init__(self, owner: TraceOwner | None) -> None:
        """Nothing can be traced without an `owner`."""
        self._owner = owner
        self._is_on = False
        self._problems: Sequence[str] = ("This host cannot be traced.",)
        self._fragments: dict[str, Path] = {}
        self._turn = asyncio.Lock()

    async def answer(
        self, message: StartTrace | StopTrace | FetchFragment
    ) -> HostTraceStopped | FragmentPart | None:
        """Does what a router asks for, one thing at a time; returns what it is to be told."""
        async with self._turn:
            match message:
                case StartTrace():
                    await self._start(message.session.level)
                    return None
                case StopTrace():
                    return await self.stop()
                case FetchFragment():
                    return await self._part(message)

    async def _start(self, level: TraceLevel) -> None:
        if self._owner is None or self._is_on:
            return
        try:
            await self._owner.start(level)
            self._is_on, self._problems = True, ()
        except PagodaError as error:
            self._problems = [str(error)]

    async def stop(self) -> HostTraceStopped:
        """Ends the trace that this router has begun, if there is one."""
        if self._owner is None or not self._is_on:
            return HostTraceStopped(list(self._problems))
        self._is_on = False
        try:
            problems = list((await self._owner.stop()).problems)
        except PagodaError:
            problems = ["The trace was ended there."]
        paths = await beside(partial(fragments_of, self._owner.directory, self._owner.run))
        self._fragments = {path.name: path for path in paths}
        # Those of hosts behind this one grow by its name, and must not be too long for the router above.
        problems = [problem[:MAX_ITEMS] for problem in problems[:MAX_FRAGMENTS]]
        return HostTraceStopped(problems, list(self._fragments)[:MAX_FRAGMENTS])

    async def _part(self, asked: FetchFragment) -> FragmentPart:
        path, data = self._fragments.get(asked.name), b""
        if path is not None:
            data = await beside(partial(_read_part, path, asked.offset))
        return FragmentPart(asked.name, asked.offset, data)


def _read_part(path: Path, offset: int) -> bytes:
    """A part of a file; nothing of one that has gone."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(MAX_PART_BYTES)
    except OSError:
        return b""


class FetchedTrace:
    """The router's end: the trace of one host."""

    def __init__(self, send: Callable[[RouterMessage], None], host: str, order: StartTrace) -> None:
        """Lets the host, which is named as `host`, trace from now on."""
        self._send = send
        self._host = host
        self._session = order.session
        self._answer: asyncio.Future[HostTraceStopped | FragmentPart] | None = None
        self._loss = ""
        send(StartTrace(msgspec.structs.replace(order.session, directory="", run="")))

    def receive(self, message: HostTraceStopped | FragmentPart) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def lose(self, reason: str) -> None:
        """Takes note that the host has gone; `reason` is a clause."""
        self._loss = reason
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(reason))

    async def stop(self) -> list[str]:
        """Ends the trace and brings the host's fragments into the directory of the router's; returns sentences
        about what is missing."""
        problems: list[str] = []
        try:
            stopped = await self._ask(StopTrace(), HostTraceStopped, _STOP_S)
            problems += stopped.problems
            for name in stopped.fragments:
                if _NAME.fullmatch(name):
                    await self._fetch(name)
        except TimeoutError:
            problems.append("It does not answer; what it has traced is in its own --profile-dir.")
        except ConnectionError as error:
            problems.append(f"It {error}; what it has traced is in its own --profile-dir.")
        except OSError as error:
            problems.append(f"Its fragments cannot be written here ({error.strerror or error}).")
        return [f"{self._host}: {problem}" for problem in problems]

    async def _ask(self, message: RouterMessage, kind: type[T], limit_s: float) -> T:
        """Raises ConnectionError: the host has gone, or says something else; TimeoutError: it says nothing."""
        if self._loss:
            raise ConnectionError(self._loss)
        self._answer = asyncio.get_running_loop().create_future()
        self._send(message)
        async with asyncio.timeout(limit_s):
            answer = await self._answer
        if not isinstance(answer, kind):
            raise ConnectionError("said what it was not asked")
        return answer

    async def _fetch(self, name: str) -> None:
        """Brings one fragment here, under a name that the router's next trace takes the place of."""
        path = Path(self._session.directory) / f"{run_prefix(self._session.run)}{name}"
        file: BinaryIO = await _on_disk(partial(open, path, "wb", opener=open_private))  # type: ignore[arg-type]
        try:
            offset = 0
            while offset <= MAX_FRAGMENT_BYTES:
                part = await self._ask(FetchFragment(name, offset), FragmentPart, _PART_S)
                if (part.name, part.offset) != (name, offset) or len(part.data) > MAX_PART_BYTES:
                    raise ConnectionError("said what it was not asked")
                if not part.data:
                    return
                await _on_disk(partial(file.write, part.data))
                offset += len(part.data)
            raise ConnectionError("has a fragment without an end")
        finally:
            await _on_disk(file.close)


async def _on_disk(work: Callable[[], T]) -> T:
    """Raises OSError: as `work` does, or the disk does not answer."""
    try:
        async with asyncio.timeout(_PART_S):
            return await beside(work)
    except TimeoutError:
        raise OSError(errno.EIO, f"the disk does not answer within {_PART_S:g} s") from None
