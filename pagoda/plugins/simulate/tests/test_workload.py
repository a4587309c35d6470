# SPDX-License-Identifier: Apache-2.0
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.errors import ConfigError
from pagoda.plugins.simulate.workload import Piece, Workload, read_workload, token_ids


def _trace(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(it)}\n" for it in lines))
    return path


def _line(at: int, hashes: list[int], length: int = 600) -> dict[str, object]:
    return {"timestamp": at, "input_length": length, "output_length": 5, "hash_ids": hashes}


def _prompts(workload: Workload) -> dict[str, tuple[Piece, ...]]:
    return {turn.name: turn.pieces for session in workload.sessions for turn in session.turns}


def test_equal_ids_are_equal_texts(tmp_path: Path) -> None:
    path = _trace(tmp_path, _line(0, [7, 8]), _line(1500, [7, 9]))
    prompts = _prompts(read_workload(path, 0, scale=1, num_requests=None))
    first, second = (
        [token for piece in prompts[name] for token in token_ids(piece)] for name in ("r0", "r1")
    )
    assert len(first) == len(second) == 600
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]


def test_further_users_have_texts_of_their_own_but_for_common_ones(tmp_path: Path) -> None:
    lines = [_line(100 * number, [1, 2 + number]) for number in range(200)]
    workload = read_workload(_trace(tmp_path, *lines), 0, scale=3, num_requests=None)
    prompts = _prompts(workload)
    assert len(prompts) == 600
    assert {pieces[0].content for pieces in prompts.values()} == {1}
    assert len({pieces[1].content for pieces in prompts.values()}) == 600
    begins = [session.at for session in workload.sessions]
    assert begins == sorted(begins)
    assert begins[-1] <= workload.duration_s


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"timestamp": 0}, "missing required field"),
        (_line(-5, [1, 2]), "Expected `float` >= 0"),
        (_line(0, [1]), "1 hash_ids of 512 tokens are too few for input_length 600"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: object, words: str) -> None:
    path = _trace(tmp_path, _line(0, [1, 2]), line)
    with pytest.raises(ConfigError, match=r"trace.jsonl line 2: ") as caught:
        read_workload(path, 0, scale=1, num_requests=None)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("duration_s: 5\nrate: -1\n", "line 2: rate: Expected `float` > 0"),
        ("duration_s: 5\nrate: 1\nusers: 2\n", "line 1: a workload has either a rate or users"),
        (
            "duration_s: 5\nusers: 2\ndaily_swing: 0.5\n",
            "line 2: bursts and daily_swing are of a rate",
        ),
        ("duration_s: 1e8\nrate: 1e8\n", "line 2: there would be more than 10,000,000 sessions"),
        ("duration_s: .inf\nrate: 1\n", "line 1: duration_s: Expected `float` <= "),
    ],
)
def test_mistakes_of_drawn_sessions_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "drawn.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_workload(path, 0, scale=1, num_requests=None)
    assert words in str(caught.value)


def test_sessions_go_on_behind_their_own_texts(tmp_path: Path) -> None:
    path = tmp_path / "drawn.yaml"
    path.write_text(
        "duration_s: 200\nrate: 2\nturns: {mean: 3}\n"
        "prefixes: [{count: 3, tokens: 100}, {count: 2, tokens: 50}]\n"
        "bursts: [{at_s: 100, for_s: 20, factor: 5}]\n"
    )
    workload = read_workload(path, 1, scale=1, num_requests=None)
    turns = [list(session.turns) for session in workload.sessions]
    assert all([turn.fresh for turn in session] == [True, False, False] for session in turns)
    assert len({session[0].pieces[:2] for session in turns}) == 6
    burst = sum(100 <= session.at < 120 for session in workload.sessions)
    before = sum(80 <= session.at < 100 for session in workload.sessions)
    assert burst > 2 * before
    again = read_workload(path, 1, scale=1, num_requests=None)
    assert [list(session.turns) for session in again.sessions] == turns


@given(st.integers(0, 2**50), st.integers(1, 700))
def test_a_piece_has_its_length_in_the_vocabulary(content: int, length: int) -> None:
    tokens = token_ids(Piece(content, length))
    assert len(tokens) == length
    assert all(0 < token < 256 for token in tokens)


def test_users_begin_the_next_session_without_end(tmp_path: Path) -> None:
    path = tmp_path / "drawn.yaml"
    path.write_text("duration_s: 100\nusers: 4\nturns: {mean: 2}\n")
    workload = read_workload(path, 0, scale=2, num_requests=None)
    assert len(workload.sessions) == 8
    turns = list(itertools.islice(workload.sessions[0].turns, 5))
    assert [turn.fresh for turn in turns] == [True, False, True, False, True]


def test_bursts_that_overlap_multiply(tmp_path: Path) -> None:
    path = tmp_path / "drawn.yaml"
    path.write_text(
        "duration_s: 40\nrate: 4\n"
        "bursts: [{at_s: 0, for_s: 40, factor: 5}, {at_s: 20, for_s: 20, factor: 5}]\n"
    )
    sessions = read_workload(path, 1, scale=1, num_requests=None).sessions
    late = sum(session.at >= 20 for session in sessions)
    assert 4 < late / (len(sessions) - late) < 6
