"""instructor in every mode that it has for servers of OpenAI's kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import instructor
import openai
import pytest
from conftest import Server
from conversations import QUESTION
from pydantic import BaseModel, Field


class Place(BaseModel, extra="forbid"):
    name: str = Field(max_length=20)
    size: int = Field(ge=0, le=999)
    kind: Literal["town", "city"]


MODES = [
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.PARALLEL_TOOLS,
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_mode(server: Server, mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=server.v1, api_key="none"), mode=mode)
    kind = Iterable[Place] if mode is instructor.Mode.PARALLEL_TOOLS else Place
    place = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=kind,
        max_tokens=300,
        max_retries=3,
    )
    if mode is instructor.Mode.PARALLEL_TOOLS:
        [place, *_] = list(place)
    assert isinstance(place, Place)
