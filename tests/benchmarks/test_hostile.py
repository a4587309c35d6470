# SPDX-License-Identifier: Apache-2.0
"""The trial of hostile clients, in its short form: answers and good streams, not times."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.chaos.hostile import trial
from benchmarks.chaos.hostile.attack import Siege
from benchmarks.chaos.hostile.client import attacks
from benchmarks.chaos.hostile.trial import Measured, Row, measure_attacks


def test_attacks_are_answered_rightly_and_break_no_good_stream() -> None:
    found = measure_attacks(["--short"])
    assert len(found.rows) >= 6
    assert found.wrong == []
    assert found.broken == []


def test_attacks_have_names_of_their_own() -> None:
    names = [attack.name for attack in attacks()]
    assert len(names) == len(set(names))
    assert len(names) > 120


async def _siege_of_a_server_that_says(answer: bytes, siege: Siege) -> str:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        return await siege.run("127.0.0.1", server.sockets[0].getsockname()[1])


@pytest.mark.parametrize(
    ("name", "right"),
    [("64 kB of noise", b"400 Bad Request"), ("1,000 requests in one packet", b"200 OK")],
)
async def test_a_siege_tells_of_wrong_answers(name: str, right: bytes) -> None:
    [siege] = [each for each in attacks() if isinstance(each, Siege) and each.name == name]
    times = 1000 if right.startswith(b"200") else 1
    answer = b"HTTP/1.1 %b\r\nContent-Length: 0\r\n\r\n"
    assert await _siege_of_a_server_that_says(answer % right * times, siege) == ""
    wrong = await _siege_of_a_server_that_says(answer % b"500 Internal Server Error", siege)
    assert wrong.endswith("status 500")
    assert (await _siege_of_a_server_that_says(b"", siege)).endswith("0 answers")


async def test_a_siege_of_a_server_that_is_gone_tells_of_it() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    for siege in attacks():
        if isinstance(siege, Siege):
            assert "no connection" in await siege.run("127.0.0.1", port)


def test_memory_that_grows_falls_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(grown_mb: float) -> bool:
        found = Measured(0.01, [Row("one", 0.1, 0.02, "")], [], grown_mb)
        monkeypatch.setattr(trial, "measure_attacks", lambda _: found)
        return trial.HOSTILE.run(True).holds

    assert measured(63.0)
    assert not measured(65.0)
