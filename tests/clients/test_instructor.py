# SPDX-License-Identifier: Apache-2.0
"""instructor in every mode that it has for servers of OpenAI's kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import instructor
import openai
import pytest
from instructor.core import ModeError
from pydantic import BaseModel, Field

from conftest import Server


class Place(BaseModel, extra="forbid"):
    name: str = Field(max_length=20)
    size: int = Field(ge=0, le=999)
    kind: Literal["town", "city"]


class User(BaseModel):
    name: str
    age: int


class calculator(BaseModel):  # noqa: N801 - the name of the tool that the embedded model knows
    """Calculates."""

    expression: str


FENCED = {
    "structured_outputs": {"regex": r'```json\n\{"name": "[A-Z][a-z]+", "age": [0-9]+\}\n```'}
}
"""Holds the answer to a block of Markdown: left to itself, a small model repeats the schema there."""

FORCED = [
    instructor.Mode.FUNCTIONS,
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.JSON_O1,
    instructor.Mode.RESPONSES_TOOLS,
    instructor.Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS,
]
"""Modes in which the server holds the answer to the schema, whatever the model."""
PROMPTED = [instructor.Mode.JSON, instructor.Mode.MD_JSON]
"""Modes in which the schema stands in the prompt, and the model must follow it."""
CHOSEN = [instructor.Mode.PARALLEL_TOOLS]
"""Modes in which the model must want to call a tool."""


def client(server: Server, mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=server.v1, api_key="none"), mode=mode)


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_no_mode_is_missing(server: Server) -> None:
    offered = set()
    for mode in instructor.Mode:
        try:
            client(server, mode)
        except ModeError:
            continue
        offered.add(mode)
    assert offered == {*FORCED, *PROMPTED, *CHOSEN}


@pytest.mark.parametrize("mode", FORCED, ids=lambda mode: mode.name)
def test_modes_that_the_server_forces(server: Server, mode: instructor.Mode) -> None:
    place = client(server, mode).chat.completions.create(
        model=server.model,
        messages=question("What is 17 + 25?"),
        response_model=Place,
        max_tokens=300,
        max_retries=0,
    )
    assert isinstance(place, Place)


@pytest.mark.parametrize("mode", PROMPTED, ids=lambda mode: mode.name)
def test_modes_that_ask_the_model(smollm2: Server, mode: instructor.Mode) -> None:
    user = client(smollm2, mode).chat.completions.create(
        model=smollm2.model,
        messages=question("Extract: Jason is 25 years old."),
        response_model=User,
        temperature=0,
        max_tokens=200,
        max_retries=0,
        **({"extra_body": FENCED} if mode is instructor.Mode.MD_JSON else {}),
    )
    assert user.model_dump() == {"name": "Jason", "age": 25}


def test_parallel_tools(server: Server) -> None:
    calls = client(server, instructor.Mode.PARALLEL_TOOLS).chat.completions.create(
        model=server.model,
        messages=question("What is 17 + 25, and what is 3 + 4?"),
        response_model=Iterable[calculator],
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )
    [call, *_] = list(calls)
    assert "+" in call.expression


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_partial_answers(server: Server, mode: instructor.Mode) -> None:
    *_, last = client(server, mode).chat.completions.create_partial(
        model=server.model,
        messages=question("What is 17 + 25?"),
        response_model=Place,
        max_tokens=300,
    )
    assert Place.model_validate(last.model_dump()) == last
