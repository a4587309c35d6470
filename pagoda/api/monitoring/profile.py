# SPDX-License-Identifier: Apache-2.0
"""Tracing of the server, switched on and off while it runs."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from aiohttp import web

from pagoda.api.errors import ApiError
from pagoda.api.http.request_context import RequestContext
from pagoda.errors import refuse
from pagoda.fleet.trace_control import TraceControl, TraceStateError
from pagoda.telemetry.tracer import LEVELS, TraceLevel

_MAX_SECONDS = 86400.0


class StartBody(msgspec.Struct, forbid_unknown_fields=True):
    """The level and the length of a trace, which ends with `stop` if no length is given."""

    level: Literal["e2e", "kernel", "verbose"] = "e2e"
    num_steps: Annotated[int, msgspec.Meta(ge=1, le=10**9)] | None = None
    seconds: float | None = None


async def start_profile(context: RequestContext) -> web.StreamResponse:
    """Answers once this process traces; its engines and their workers follow at once."""
    control = _control(context)
    body = await context.parse(StartBody) if context.http.can_read_body else StartBody()
    _check(body, context.service.is_router)
    try:
        await control.start(LEVELS[body.level], num_steps=body.num_steps, seconds=body.seconds)
    except TraceStateError as error:
        raise ApiError(409, str(error), code="profile_running") from None
    return context.json(_described(control, LEVELS[body.level]))


async def stop_profile(context: RequestContext) -> web.StreamResponse:
    """Answers once all fragments are closed, or some seconds later, with what went wrong. Of a trace that ended by
    itself it tells once."""
    control = _control(context)
    try:
        ended = await control.stop()
    except TraceStateError as error:
        raise ApiError(409, str(error), code="no_profile") from None
    return context.json({**_described(control, ended.session.level), "problems": ended.problems})


def _control(context: RequestContext) -> TraceControl:
    if context.service.tracing is None:
        raise ApiError(404, "This server cannot be traced.")
    return context.service.tracing


def _check(body: StartBody, is_router: bool) -> None:
    if body.seconds is not None and not 0 < body.seconds <= _MAX_SECONDS:
        refuse("seconds", f"must be above 0 and at most {_MAX_SECONDS:g}, got {body.seconds}")
    if body.num_steps is not None and body.seconds is not None:
        refuse("num_steps", "and seconds exclude each other")
    if body.num_steps is not None and is_router:
        refuse("num_steps", "is not for a router, which computes no steps; give seconds")


def _described(control: TraceControl, level: TraceLevel) -> dict[str, str]:
    directory = str(control.directory.absolute())
    return {"directory": directory, "run": control.run, "level": level.name.lower()}
