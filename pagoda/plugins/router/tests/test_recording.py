# SPDX-License-Identifier: Apache-2.0
import json
import math
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_fleet import request

from pagoda.errors import ConfigError
from pagoda.fleet.placement import TrackedRequest
from pagoda.plugins.router.recording import Recorder


def record(path: Path, *prompts: list[int], block_size: int = 4, **more: object) -> None:
    recorder = Recorder(path, block_size)
    recorder.start(10.0)
    for number, prompt in enumerate(prompts):
        tracked = TrackedRequest(request(f"r{number}", prompt, 8, **more), 10.5 + number)
        tracked.token_ids += [7] * (number + 1)
        recorder.ended("chat", tracked)
    recorder.close()


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_tell_when_how_long_and_nothing_of_the_text(tmp_path: Path) -> None:
    record(tmp_path / "a", [1, 2, 3, 4, 5], [1, 2, 3, 4], session="alice", priority=2)
    first, second = lines(tmp_path / "a")
    ids, session = first.pop("hash_ids"), first.pop("session")
    assert first == {
        "timestamp": 500.0,
        "input_length": 5,
        "output_length": 1,
        "block_size": 4,
        "model": "chat",
        "priority": 2,
    }
    assert second["timestamp"] == 1500.0
    assert second["session"] == session
    assert second["hash_ids"] == ids[:1]  # type: ignore[index]
    record(tmp_path / "b", [1, 2, 3, 4, 5], session="alice")
    [other] = lines(tmp_path / "b")
    assert not set(other["hash_ids"]) & set(ids)  # type: ignore[call-overload]
    assert other["session"] != session


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=8))
def test_ids_are_equal_as_far_as_whole_blocks_of_prompts_are(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> None:
    path = tmp_path_factory.mktemp("record") / "trace"
    record(path, *prompts)
    recorded = [it["hash_ids"] for it in lines(path)]
    assert [len(ids) for ids in recorded] == [math.ceil(len(it) / 4) for it in prompts]  # type: ignore[arg-type]
    blocks = {
        (tuple(prompt[: 4 * end]), ids[end - 1])  # type: ignore[index]
        for prompt, ids in zip(prompts, recorded, strict=True)
        for end in range(1, len(ids) + 1)  # type: ignore[arg-type]
    }
    assert len(blocks) == len({text for text, _ in blocks}) == len({key for _, key in blocks})


def test_salts_and_long_prompts_count(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a", 4)
    recorder.start(0.0)
    long = list(range(1000))
    for number, (prompt, salt) in enumerate([(long, None), (long, "x"), (long[:400], None)]):
        recorder.ended("", TrackedRequest(request(f"{number}", prompt, cache_salt=salt), 1.0))
    recorder.close()
    plain, salted, short = (it["hash_ids"] for it in lines(tmp_path / "a"))
    assert plain[:100] == short  # type: ignore[index]
    assert not set(plain) & set(salted)  # type: ignore[call-overload]


def test_files_are_bounded_and_those_before_are_kept(tmp_path: Path) -> None:
    path, before = tmp_path / "a", tmp_path / "a.1"
    path.write_text("older\n")
    recorder = Recorder(path, 4, max_bytes=200)
    recorder.start(0.0)
    assert before.read_text() == "older\n"
    for number in range(9):
        recorder.ended("", TrackedRequest(request(f"{number}", [1, 2]), float(number)))
    recorder.close()
    kept = [it["timestamp"] for it in lines(before) + lines(path)]
    assert kept == [1e3 * number for number in range(9)][-len(kept) :]
    assert max(path.stat().st_size, before.stat().st_size) <= 200


def test_a_file_that_cannot_be_written_is_told_once_and_taken_up_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"--record: .*/none/a cannot be written .No such file"):
        Recorder(tmp_path / "none" / "a").start(0.0)
    with pytest.raises(ConfigError, match="File exists"):
        Recorder(Path("/dev/full")).start(0.0)
    directory, gone = tmp_path / "there", tmp_path / "gone"
    directory.mkdir()
    recorder = Recorder(directory / "a", 4, max_bytes=1)  # each line begins a file
    recorder.start(0.0)
    tracked, told = TrackedRequest(request("r", [1, 2]), 1.0), threading.Event()
    caplog.handler.addFilter(lambda _: told.set() or True)
    directory.rename(gone)
    recorder.ended("", tracked)
    assert told.wait(60)
    gone.rename(directory)
    recorder.ended("", tracked)
    recorder.close()
    assert len(lines(directory / "a")) == 1
    recorder = Recorder(directory / "a", 4, max_bytes=1)
    recorder.start(0.0)
    directory.rename(gone)
    for _ in range(3):
        recorder.ended("", tracked)
    recorder.close()
    assert [it.levelname for it in caplog.records] == 2 * ["WARNING"]
