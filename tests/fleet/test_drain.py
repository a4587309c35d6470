# SPDX-License-Identifier: Apache-2.0
"""A dispatcher that drains finishes bodies that it has accepted, whenever their requests come."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from virtual_fleet import ask, engine_config, request, start_fleet, virtual

from pagoda.errors import OverloadedError
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.plugins.simulate.engine import SimEngine


async def _fleet() -> Dispatcher:
    return await start_fleet([SimEngine(engine_config())], "round-robin")


@virtual
async def test_a_body_that_is_held_has_not_ended() -> None:
    dispatcher = await _fleet()
    with dispatcher.hold("body"):
        draining = asyncio.create_task(dispatcher.drain(600))
        await asyncio.sleep(1)
        assert not draining.done()
        refused = await ask(dispatcher, request("other", body="another"))
        alone = await ask(dispatcher, request("alone"))
        assert [str(it.refusal) for it in (refused, alone)] == ["The server is shutting down."] * 2
        with pytest.raises(OverloadedError, match="shutting down"), dispatcher.hold("late"):
            pass
        for step in range(3):
            assert (await ask(dispatcher, request(f"step {step}", body="body"))).complete
        assert not draining.done()
    await draining
    assert (await ask(dispatcher, request("late", body="body"))).refusal is not None


@virtual
async def test_a_body_of_which_a_request_runs_is_accepted() -> None:
    dispatcher = await _fleet()
    first = asyncio.create_task(ask(dispatcher, request("first", body="body")))
    await asyncio.sleep(0.05)
    draining = asyncio.create_task(dispatcher.drain(600))
    await asyncio.sleep(0)
    second = await ask(dispatcher, request("second", body="body"))
    assert (await first).complete
    assert second.complete
    await draining


@virtual
async def test_a_drain_that_is_over_takes_nothing_of_a_body_that_is_held() -> None:
    dispatcher = await _fleet()
    with dispatcher.hold("body"):
        async with aclosing(
            dispatcher.generate(request("long", max_tokens=100, body="body"))
        ) as it:
            await anext(it)
            await dispatcher.drain(0.0)
            assert str((await ask(dispatcher, request("next", body="body"))).refusal)
