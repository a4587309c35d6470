# SPDX-License-Identifier: Apache-2.0
"""Messages between a frontend and its engine that get lost, come twice or out of turn: another engine goes on."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from test_fleet import collect, fleet
from virtual_fleet import expected, request

from pagoda.faults.injector import FaultPlan
from pagoda.ipc.numbered import Incoming, LostMessageError, Outgoing
from pagoda.messages.frontend import FinishReason


@pytest.mark.parametrize(
    "schedule",
    [
        "frontend.receive:drop@12",
        "frontend.receive:double@12",
        "frontend.receive:reorder@12",
        "frontend.send:drop@3",
        "frontend.send:double@3",
        "frontend.send:corrupt@3",
    ],
)
async def test_answers_are_the_same(schedule: str) -> None:
    requests = [request(f"r{index}", max_tokens=40) for index in range(6)]
    async with fleet(1, faults=FaultPlan(schedule), engine_timeout_s=2.0) as dispatcher:
        answers = await asyncio.gather(*(collect(dispatcher, it) for it in requests))
        (load,) = (await dispatcher.load()).replicas
        assert load.num_losses > 0
    assert answers == [(expected(it), FinishReason.LENGTH) for it in requests]


def test_numbers() -> None:
    outgoing, incoming = Outgoing(), Incoming()
    sent = [outgoing.frames(payload) for payload in (b"a", b"b", b"c")]
    assert [incoming.payload(frames) for frames in sent[:2]] == [b"a", b"b"]
    with pytest.raises(LostMessageError, match="sent message 2 where number 3 was due"):
        incoming.payload(sent[1])
    assert Incoming().payload([b"of one who numbers none"]) == b"of one who numbers none"


def test_what_comes_behind_a_lost_message_counts_for_nothing() -> None:
    outgoing, incoming = Outgoing(), Incoming()
    first, second, third, fourth = (
        outgoing.frames(payload) for payload in (b"a", b"b", b"c", b"d")
    )
    taken = []
    for frames in (first, third, second, fourth):
        with contextlib.suppress(LostMessageError):
            taken.append(incoming.payload(frames))
    assert taken == [b"a", b"b"]
