# SPDX-License-Identifier: Apache-2.0
"""Responses that are made while no client waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pagoda.api.answers.generation import Generation
from pagoda.api.errors import as_api_error
from pagoda.concurrency.async_utils import cancel_all
from pagoda.plugins.responses.events import EventLog
from pagoda.plugins.responses.response import ResponseAnswer


class BackgroundRun:
    """The work on one background response."""

    def __init__(
        self, answer: ResponseAnswer, generation: Generation, log: EventLog | None
    ) -> None:
        """`log` gets the events; without it there are none."""
        self.answer = answer
        self.log = log
        self.on_end: Callable[[], None] = lambda: None
        """Listener for the end of the work."""
        self._generation = generation
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.answer.start()
        self._task = asyncio.create_task(self._run())

    async def cancel(self) -> None:
        """Ends the work; returns when it has ended."""
        if self._task is not None:
            await cancel_all([self._task])
        if self.answer.is_running:  # the task had not begun
            self._end()

    async def _run(self) -> None:
        try:
            await self._generation.run(self.answer)
        except Exception as error:  # the client is told by the response
            self.answer.fail(as_api_error(error, self.answer.response_id))
        finally:
            self._end()

    def _end(self) -> None:
        if self.answer.is_running:
            self.answer.cancel()
        if self.log is not None:
            self.log.close()
        self.on_end()
