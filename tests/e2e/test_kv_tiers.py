# SPDX-License-Identifier: Apache-2.0
"""A device of 64 blocks with tiers in host memory and on disk answers as a device does that holds everything.

Workers, engines and servers are killed meanwhile, and objects on disk are damaged.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest
from kv_tiers import mount, small_file_system
from streams import Answer, bodies, children, stream_all, until_more
from tiers import (
    DEVICE_BLOCKS,
    MODEL_FLAGS,
    ask_all,
    figures,
    flags,
    keys_of,
    messages,
    num_right,
    objects,
    some_questions,
    until_written,
)

from pagoda.cli.server_process import server_process

QUESTIONS = some_questions()
FEW = some_questions(long=3, short=0)
NUM_STREAMS = 12


class Expected(NamedTuple):
    """Answers of a device that holds everything."""

    messages: list[dict[str, object]]
    few: list[dict[str, object]]
    streams: list[Answer]
    keys: list[list[bytes]]


@pytest.fixture(scope="module")
def expected(plain_url: str) -> Expected:
    async def ask(url: str) -> Expected:
        replies = await ask_all(url, QUESTIONS)
        assert num_right(QUESTIONS, replies) >= 0.95 * len(QUESTIONS)
        return Expected(
            messages(replies),
            messages(await ask_all(url, FEW)),
            await stream_all(url, bodies(NUM_STREAMS, 160)),
            await keys_of(url, QUESTIONS),
        )

    return asyncio.run(ask(plain_url))


class Kept(NamedTuple):
    """A directory into which all questions have been written, as a server left it."""

    directory: Path
    passes: list[list[dict[str, object]]]
    """The answers of that server, each time in the order of the questions."""
    loaded: dict[str, int]
    """Blocks that it loaded from each tier."""


@pytest.fixture(scope="module")
def kept(expected: Expected, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Everything is asked three times, now forwards, now backwards, so that blocks of all tiers are met again."""
    directory = tmp_path_factory.mktemp("tiers") / "kv"

    async def ask(url: str) -> Kept:
        passes = []
        for turn in (1, -1, 1):
            replies = await ask_all(url, QUESTIONS[::turn])
            passes.append(messages(replies)[::turn])
        await until_written(directory, expected.keys)
        loaded = {tier: (await figures(url))[tier, "loaded"] for tier in ("host", "disk")}
        return Kept(directory, passes, loaded)

    with server_process(flags(directory)) as server:
        return asyncio.run(ask(server.base_url))


@pytest.fixture
def copy(kept: Kept, tmp_path: Path) -> Path:
    """A directory with all blocks, to be damaged."""
    return Path(shutil.copytree(kept.directory, tmp_path / "kv"))


def test_sixteen_at_a_time_through_all_tiers_are_answered_as_on_one_large_device(
    kept: Kept, expected: Expected
) -> None:
    assert len({key for keys in expected.keys for key in keys}) > 5 * DEVICE_BLOCKS
    assert kept.passes == [expected.messages] * 3
    assert kept.loaded["host"] > 0
    assert kept.loaded["disk"] > 0


def test_a_new_server_finds_what_the_last_one_knew(copy: Path, expected: Expected) -> None:
    """The disk's speed and the processor's say how much of it is loaded instead of computed."""
    with server_process(flags(copy, num_kv_blocks=1024)) as server:
        replies = asyncio.run(ask_all(server.base_url, QUESTIONS, 4))
        held = asyncio.run(figures(server.base_url))["disk", "held"]
    assert messages(replies) == expected.messages
    assert held >= 0.99 * len({key for keys in expected.keys for key in keys})


async def test_worker_and_engine_may_die(copy: Path, expected: Expected) -> None:
    async def kill(received: Callable[[], int]) -> None:
        for module in ("pagoda.worker.main", "pagoda.engine.main", "pagoda.worker.main"):
            await until_more(received, 4 * NUM_STREAMS)
            [victim] = children(server.pid, module)
            os.kill(victim, signal.SIGKILL)
        await until_more(received, 1)

    with server_process(flags(copy)) as server:
        disturbed = await stream_all(server.base_url, bodies(NUM_STREAMS, 160), kill)
        again = messages(await ask_all(server.base_url, QUESTIONS))
        loaded = await figures(server.base_url)
    assert disturbed == expected.streams
    assert again == expected.messages
    assert loaded["disk", "loaded"] > 0


def flip(path: Path, offset: int | None = None) -> None:
    """Changes a byte, by default one in the middle, which is of the payload."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if offset is None else offset] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path, share: float) -> None:
    os.truncate(path, int(share * path.stat().st_size))


def of_another_key(path: Path) -> None:
    """A whole object, sound in itself, under the name of another block."""
    other = next(p for p in path.parent.parent.glob("??/*") if p.is_file() and p != path)
    path.write_bytes(other.read_bytes())


def replace(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


DAMAGES: list[Callable[[Path], None]] = [
    flip,
    lambda path: flip(path, 1),  # of the header
    lambda path: flip(path, 8),  # of the version
    lambda path: truncate(path, 0.5),
    lambda path: truncate(path, 0),
    lambda path: truncate(path, 1.5),
    of_another_key,
    lambda path: replace(path, Path.mkdir),
    lambda path: replace(path, lambda it: it.symlink_to("nowhere")),
    lambda path: replace(path, os.mkfifo),
]


def add_strangers(directory: Path) -> None:
    """What does not belong there, beside the manifest and between the objects."""
    [rank] = [path for path in directory.iterdir() if path.is_dir()]
    fan = next(path for path in rank.iterdir() if path.is_dir())
    (directory / "notes.txt").write_text("mine")
    (directory / ("0" * 64)).mkdir()
    (rank / "core").write_bytes(b"\0" * 5000)
    (rank / "zz").mkdir()
    (fan / "README").write_text("mine")
    (fan / ("g" * 62)).write_text("no key")
    (fan / ".tmp-1-1").write_bytes(b"half")
    (fan / ("0" * 62)).write_bytes(b"a stranger with a good name")


def test_damaged_objects_are_misses(
    copy: Path, expected: Expected, capfd: pytest.CaptureFixture[str]
) -> None:
    """Some prefixes are damaged at their root, others behind it: both are met."""
    files = objects(copy)
    roots = sorted({keys[0] for keys in expected.keys if keys})
    damaged_roots = set(roots[::2])
    behind = {
        key for keys in expected.keys if keys and keys[0] not in damaged_roots for key in keys[1:]
    }
    damaged = [*sorted(damaged_roots), *sorted(behind)[::3]]
    for index, key in enumerate(damaged):
        DAMAGES[index % len(DAMAGES)](files[key][0])
    add_strangers(copy)
    with server_process(flags(copy)) as server:
        passes = [asyncio.run(ask_all(server.base_url, QUESTIONS)) for _ in range(2)]
        counts = asyncio.run(figures(server.base_url))
    assert [messages(replies) for replies in passes] == [expected.messages] * 2
    assert counts["disk", "failed"] > 0
    assert counts["disk", "loaded"] > 0
    assert "WARNING" in capfd.readouterr().err
    assert (copy / "notes.txt").read_text() == "mine"


async def test_a_request_may_fail_instead_of_being_computed_again(
    copy: Path, expected: Expected, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once: what is damaged is removed, and the next request computes it. As ever, the log says why it failed."""
    index = next(index for index, keys in enumerate(expected.keys) if len(keys) > 9)
    [damaged] = objects(copy)[expected.keys[index][5]]
    flip(damaged)
    body = QUESTIONS[index].body("pagoda-tiny")
    fail = [*flags(copy, host_blocks=0), "--kv-load-failure", "fail"]
    with server_process(fail) as server:
        async with (
            aiohttp.ClientSession(server.base_url) as session,
            session.post("/v1/chat/completions", json=body) as answer,
        ):
            assert answer.status == 500
            assert (await answer.json())["error"]["type"] == "server_error"
        replies = await ask_all(server.base_url, QUESTIONS)
    assert messages(replies) == expected.messages
    sentence = "KV that was found for this request could not be loaded: its checksum is wrong."
    assert capfd.readouterr().err.count(sentence) == 1


def serve(*arguments: str) -> tuple[int, str]:
    """Exit code and error of a server that is not to start."""
    command = [sys.executable, "-m", "pagoda", "serve", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_the_manifest_of_other_blocks_is_refused(copy: Path) -> None:
    [directory] = [path for path in copy.iterdir() if path.is_dir()]
    manifest = directory / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"block_size": 32', '"block_size": 16'))
    code, error = serve(*flags(copy))
    assert code == 2
    assert error.count("\n") == 1
    assert f"{manifest} is that of other blocks, of pagoda_tiny" in error


def test_what_a_server_wrote_can_be_looked_into(copy: Path, expected: Expected) -> None:
    def kv(command: str) -> tuple[int, str]:
        arguments = [sys.executable, "-m", "pagoda", "kv", command, str(copy)]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout

    count = len(objects(copy))
    code, listed = kv("ls")
    assert code == 0
    assert "pagoda_tiny" in listed
    assert f"{count} blocks" in listed
    assert kv("verify") == (0, f"{count} blocks checked, none damaged.\n")
    [damaged] = objects(copy)[expected.keys[-1][0]]
    flip(damaged)
    code, found = kv("verify")
    assert code == 1
    assert f"{damaged}: its checksum is wrong" in found


def test_a_directory_that_vanishes_is_a_miss(
    copy: Path, expected: Expected, capfd: pytest.CaptureFixture[str]
) -> None:
    with server_process(flags(copy, host_blocks=0)) as server:
        before = asyncio.run(ask_all(server.base_url, QUESTIONS[::2]))
        shutil.rmtree(copy)
        after = asyncio.run(ask_all(server.base_url, QUESTIONS))
        again = asyncio.run(ask_all(server.base_url, QUESTIONS))
    assert messages(before) == expected.messages[::2]
    assert messages(after) == messages(again) == expected.messages
    assert "WARNING" in capfd.readouterr().err


def test_a_full_disk_stops_writing_only(
    tmp_path: Path, expected: Expected, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_file_system(tmp_path / "small", "8m") as small:
        (small / "ballast").write_bytes(bytes(6 * 2**20))
        with server_process(flags(small / "kv", kv_disk_bytes="7MiB")) as server:
            passes = [asyncio.run(ask_all(server.base_url, QUESTIONS)) for _ in range(2)]
            full = asyncio.run(figures(server.base_url))
            (small / "ballast").unlink()
            stored = full["disk", "stored"]
            while stored == full["disk", "stored"]:  # it is tried again after a pause only
                passes.append(asyncio.run(ask_all(server.base_url, QUESTIONS)))
                stored = asyncio.run(figures(server.base_url))["disk", "stored"]
    assert all(messages(replies) == expected.messages for replies in passes)
    assert full["disk", "failed"] > 0
    assert "WARNING" in capfd.readouterr().err


def test_a_file_system_that_becomes_read_only_is_read_still(
    kept: Kept, tmp_path: Path, expected: Expected, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_file_system(tmp_path / "locked", "256m") as locked:
        some = shutil.copytree(kept.directory, locked / "kv")
        for path in sorted(some.glob("*/??"))[::2]:
            shutil.rmtree(path)
        with server_process(flags(some, host_blocks=0, kv_disk_bytes="200MiB")) as server:
            asyncio.run(ask_all(server.base_url, FEW))
            mount("-o", "remount,ro", str(locked))
            replies = asyncio.run(ask_all(server.base_url, QUESTIONS))
            counts = asyncio.run(figures(server.base_url))
    assert messages(replies) == expected.messages
    assert counts["disk", "loaded"] > 0
    assert counts["disk", "failed"] > 0
    assert "WARNING" in capfd.readouterr().err


@pytest.mark.parametrize("host_blocks", [0, 16])
def test_preempted_requests_go_to_disk_and_come_back(
    host_blocks: int, tmp_path: Path, plain_url: str
) -> None:
    """The device holds a quarter of what the requests need, which have little in common."""
    requests = bodies(12, 320, skill="recall_40")
    expected = asyncio.run(stream_all(plain_url, requests))
    tiers = flags(tmp_path / "kv", host_blocks=host_blocks, kv_disk_min_touches=2)
    with server_process(tiers) as server:
        streams = asyncio.run(stream_all(server.base_url, requests))
        counts = asyncio.run(figures(server.base_url))
    assert streams == expected
    assert counts["disk", "stored"] > 0
    assert counts["disk", "loaded"] + counts["host", "loaded"] > 0


def test_two_servers_share_a_directory(tmp_path: Path, expected: Expected) -> None:
    """The second one starts while there is nothing, and finds what the first one writes."""
    directory = tmp_path / "kv"

    async def ask_both(one: str, two: str) -> None:
        assert messages(await ask_all(one, QUESTIONS)) == expected.messages
        first = {key for question in FEW for key in expected.keys[QUESTIONS.index(question)]}
        while not first <= objects(directory).keys():
            # What had left the device before its turn to be written came is offered by the next request.
            await ask_all(one, FEW)
        assert messages(await ask_all(two, FEW)) == expected.few
        assert (await figures(two))["disk", "loaded"] > 0
        both = await asyncio.gather(ask_all(one, QUESTIONS[::-1]), ask_all(two, QUESTIONS))
        assert [messages(both[0])[::-1], messages(both[1])] == [expected.messages] * 2

    with (
        server_process(flags(directory, host_blocks=0)) as one,
        server_process(flags(directory, host_blocks=0)) as two,
    ):
        asyncio.run(ask_both(one.base_url, two.base_url))


async def test_a_server_may_be_killed_while_it_writes(tmp_path: Path, expected: Expected) -> None:
    directory = tmp_path / "kv"
    with server_process(flags(directory)) as server:
        asking = asyncio.create_task(ask_all(server.base_url, QUESTIONS))
        while len(objects(directory)) < 20:
            await asyncio.sleep(0)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(Exception, match=r"disconnected|reset|connect"):
            await asking
    with server_process(flags(directory)) as server:
        replies = await ask_all(server.base_url, QUESTIONS)
        again = await ask_all(server.base_url, QUESTIONS)
        counts = await figures(server.base_url)
        await until_written(directory, expected.keys)
    assert messages(replies) == messages(again) == expected.messages
    assert counts["disk", "loaded"] > 0


@pytest.mark.parametrize("topology", ["--tp 2", "--pp 2", "--dp 2"])
def test_tiers_of_several_workers(topology: str, tmp_path: Path, expected: Expected) -> None:
    tiers = flags(tmp_path / "kv", kv_host_bytes="16MiB")
    with server_process([*tiers, *topology.split()]) as server:
        passes = [asyncio.run(ask_all(server.base_url, QUESTIONS[::turn])) for turn in (1, -1)]
        counts = asyncio.run(figures(server.base_url))
    assert [messages(replies) for replies in passes] == [expected.messages, expected.messages[::-1]]
    assert counts["host", "loaded"] > 0
    assert counts["disk", "loaded"] > 0


def test_int8_keys_and_values_come_back_as_they_went(tmp_path: Path) -> None:
    int8 = ["--kv-cache-dtype", "int8"]
    with server_process([*MODEL_FLAGS, *int8]) as server:
        large = messages(asyncio.run(ask_all(server.base_url, FEW)))
    with server_process([*flags(tmp_path / "kv", host_blocks=16), *int8]) as server:
        passes = [asyncio.run(ask_all(server.base_url, FEW)) for _ in range(3)]
        loaded = asyncio.run(figures(server.base_url))
    assert [messages(replies) for replies in passes] == [large] * 3
    assert loaded["disk", "loaded"] > 0
