# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagoda.cli.demo import choose_questions, demo_questions, shorten
from pagoda.cli.openai_client import ClientMessage, ClientToolCall, ToolFunction
from pagoda.cli.questions import Question, load_questions
from pagoda.errors import ConfigError
from pagoda.plugins.bench.accuracy import Grade, score_by_skill


def _line(skill: str = "sum", number: int = 1, **changes: object) -> dict[str, object]:
    return {
        "id": f"{skill}-{number}",
        "skill": skill,
        "messages": [{"role": "user", "content": "1 + 1 ="}],
        "max_tokens": 8,
        "expect": {"text": "1 + 1 = 2"},
        **changes,
    }


def _load(
    tmp_path: Path, *lines: dict[str, object], skills: tuple[str, ...] = ()
) -> list[Question]:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_questions(path, skills)


def _call(name: str, arguments: str) -> ClientMessage:
    return ClientMessage(tool_calls=[ClientToolCall(ToolFunction(name, arguments))])


@pytest.mark.parametrize(
    ("expect", "right", "wrong"),
    [
        (
            {"text": "2"},
            [ClientMessage(" 2\n"), ClientMessage("2", "well ...")],
            [ClientMessage("22"), ClientMessage()],
        ),
        ({"contains": "2"}, [ClientMessage("so 2.")], [ClientMessage("two"), ClientMessage(None)]),
        (
            {"json": {"a": [1, None]}},
            [ClientMessage('{"a": [1, null]}'), ClientMessage('\n{"a":[1,null]} ')],
            [ClientMessage('{"a": [1]}'), ClientMessage('{"a": [1, null]'), ClientMessage("")],
        ),
        ({"json": None}, [ClientMessage("null")], [ClientMessage(""), ClientMessage("0")]),
        (
            {"tool_call": {"name": "add", "arguments": {"a": 1, "b": 2}}},
            [_call("add", '{"b": 2, "a": 1}')],
            [
                _call("sub", '{"a": 1, "b": 2}'),
                _call("add", '{"a": 1}'),
                _call("add", "{"),
                ClientMessage("add(1, 2)"),
                ClientMessage(
                    tool_calls=[*(_call("add", '{"a": 1, "b": 2}').tool_calls or []) * 2]
                ),
            ],
        ),
    ],
)
def test_answers_are_checked_exactly(
    expect: dict[str, object],
    right: list[ClientMessage],
    wrong: list[ClientMessage],
    tmp_path: Path,
) -> None:
    [question] = _load(tmp_path, _line(expect=expect))
    for answer in right:
        assert question.expect.is_met_by(answer)
    for answer in wrong:
        assert not question.expect.is_met_by(answer)


def test_a_question_becomes_a_greedy_chat_request(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    switches = {"enable_thinking": True}
    plain, full = _load(
        tmp_path, _line(), _line(number=2, tools=tools, chat_template_kwargs=switches)
    )
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "1 + 1 ="}],
        "max_tokens": 8,
        "temperature": 0,
    }
    assert plain.body("m") == body
    assert full.body("m") == {**body, "tools": tools, "chat_template_kwargs": switches}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (_line(expect={}), "exactly one of text"),
        (_line(expect={"text": "a", "contains": "a"}), "exactly one of text"),
        (_line(expect={"sounds_like": "a"}), "sounds_like"),
        (_line(hint="two"), "hint"),
        ({"id": "x"}, "skill"),
    ],
)
def test_a_bad_question_is_refused_with_its_line(
    line: dict[str, object], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"line 2.*{problem}"):
        _load(tmp_path, _line(), line)


def test_skills_are_chosen_by_name(tmp_path: Path) -> None:
    lines = [_line("sum"), _line("sort"), _line("sum", 2)]
    assert [q.id for q in _load(tmp_path, *lines, skills=("sum",))] == ["sum-1", "sum-2"]
    with pytest.raises(ConfigError, match=r"--skill song is not in .*; it has sort, sum"):
        _load(tmp_path, *lines, skills=("song",))


def test_scores_are_counted_by_skill(tmp_path: Path) -> None:
    questions = _load(tmp_path, _line("sum"), _line("sort"), _line("sum", 2))
    verdicts = (True, False, False)
    grades = [Grade(q, "", right) for q, right in zip(questions, verdicts, strict=True)]
    scores = score_by_skill(grades)
    assert {name: (s.correct, s.asked) for name, s in scores.items()} == {
        "sum": (1, 2),
        "sort": (0, 1),
    }
    assert scores["sum"].accuracy == 0.5


def test_the_demo_asks_the_first_question_of_each_skill(tmp_path: Path) -> None:
    lines = [_line("recall_short"), _line("addition"), _line("song"), _line("addition", 2)]
    chosen = choose_questions(_load(tmp_path, *lines))
    assert [question.id for question in chosen] == ["addition-1", "recall_short-1"]


def test_the_demo_asks_other_models_about_the_world() -> None:
    assert demo_questions(None) == demo_questions("pagoda-tiny") != demo_questions("smollm2")
    assert {question.skill for question in demo_questions("smollm2")} >= {"fact", "conversation"}


def test_the_demo_shows_long_questions_by_their_ends(tmp_path: Path) -> None:
    text = "\n".join(f"line {number}" for number in range(10))
    messages = [{"role": "user", "content": text}]
    short, long = _load(tmp_path, _line(), _line(number=2, messages=messages))
    assert shorten(short) == "1 + 1 ="
    assert shorten(long) == "line 0\nline 1\n... (7 more lines)\nline 9"
