"""Requests that may crash the worker.

A crash raises the crash count of each request in the steps in flight, and of no request that waits. From
`QUARANTINE_CRASHES` on, a request is in quarantine: it runs alone, so that it neither raises the counts of others
nor has its own raised by them. The count starts anew once the request gets further than it was at the crash.
"""

from __future__ import annotations

from operator import attrgetter

from pagoda.engine.request import Request, RequestState

QUARANTINE_CRASHES = 2
MAX_CRASHES = QUARANTINE_CRASHES + 3
"""A request that crashed the worker three times alone fails."""


class Quarantine:
    def __init__(self) -> None:
        self.requests: set[Request] = set()

    def first(self) -> Request | None:
        """The request to run alone now; None when all run together."""
        return min(self.requests, key=attrgetter("order_key"), default=None)

    def on_crash(self, in_flight: set[Request]) -> list[Request]:
        """Counts a crash during these requests; returns those that must fail, in order."""
        most = MAX_CRASHES if len(in_flight) == 1 else QUARANTINE_CRASHES
        alive = [request for request in in_flight if request.state is not RequestState.FINISHED]
        for request in alive:
            request.crash_point = max(request.crash_point, request.num_scheduled_tokens)
            request.crash_count = min(request.crash_count + 1, most)
            if request.crash_count >= QUARANTINE_CRASHES:
                self.requests.add(request)
        failing = (request for request in alive if request.crash_count >= MAX_CRASHES)
        return sorted(failing, key=attrgetter("order_key"))

    def on_progress(self, request: Request) -> None:
        if request.num_computed_tokens >= request.crash_point:
            request.crash_count = 0
            self.requests.discard(request)

    def on_finished(self, request: Request) -> None:
        self.requests.discard(request)
