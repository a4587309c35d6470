# SPDX-License-Identifier: Apache-2.0
"""Agents: pydantic-ai and OpenAI's Agents SDK, with tools and with typed answers."""

from __future__ import annotations

from typing import Literal

import agents
import openai
import pytest
from conversations import ANSWER, QUESTION
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from conftest import Server


class Place(BaseModel):
    name: str = Field(max_length=20)
    size: int = Field(ge=0, le=999)
    kind: Literal["town", "city"]


class User(BaseModel):
    name: str
    age: int


def calculator(expression: str) -> str:
    """Calculates."""
    return ANSWER if expression else "nothing"


@pytest.fixture
def model(server: Server) -> OpenAIChatModel:
    return _model(server)


def _model(server: Server) -> OpenAIChatModel:
    provider = OpenAIProvider(base_url=server.v1, api_key="none")
    return OpenAIChatModel(server.model, provider=provider)


async def test_pydantic_ai_answers_with_tools(model: OpenAIChatModel) -> None:
    agent = Agent(model, tools=[calculator], model_settings={"temperature": 0, "max_tokens": 200})
    result = await agent.run(QUESTION)
    assert result.output


@pytest.mark.parametrize("output", [NativeOutput, ToolOutput])
async def test_pydantic_ai_answers_in_a_type(model: OpenAIChatModel, output: type) -> None:
    agent = Agent(model, output_type=output(Place), model_settings={"max_tokens": 300})
    assert isinstance((await agent.run(QUESTION)).output, Place)


async def test_pydantic_ai_prompts_for_a_type(smollm2: Server) -> None:
    """The schema stands in the prompt, so that the model must follow it; the server sees to JSON alone."""
    settings = {"max_tokens": 200, "temperature": 0}
    output = PromptedOutput(User, template="{schema}")
    agent = Agent(_model(smollm2), output_type=output, model_settings=settings)
    example = '"Ann is 7 years old." is {"name": "Ann", "age": 7}.'
    answer = await agent.run(f'{example} What is "Jason is 25 years old."?')
    assert answer.output == User(name="Jason", age=25)


async def test_pydantic_ai_streams(model: OpenAIChatModel) -> None:
    agent = Agent(model, model_settings={"temperature": 0, "max_tokens": 100})
    async with agent.run_stream(QUESTION) as result:
        text = "".join([piece async for piece in result.stream_text(delta=True)])
    assert ANSWER in text


@pytest.fixture(params=["responses", "chat"])
def agents_model(server: Server, request: pytest.FixtureRequest) -> agents.Model:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=server.v1, api_key="none")
    if request.param == "chat":
        return agents.OpenAIChatCompletionsModel(model=server.model, openai_client=client)
    return agents.OpenAIResponsesModel(model=server.model, openai_client=client)


async def test_openai_agents(agents_model: agents.Model) -> None:
    agent = agents.Agent(
        name="a",
        model=agents_model,
        tools=[agents.function_tool(calculator)],
        model_settings=agents.ModelSettings(temperature=0, max_tokens=200),
    )
    result = await agents.Runner.run(agent, QUESTION)
    assert result.final_output


async def test_openai_agents_stream(agents_model: agents.Model) -> None:
    settings = agents.ModelSettings(temperature=0, max_tokens=200)
    agent = agents.Agent(name="a", model=agents_model, model_settings=settings)
    result = agents.Runner.run_streamed(agent, QUESTION)
    kinds = [event.type async for event in result.stream_events()]
    assert "raw_response_event" in kinds
    assert ANSWER in result.final_output


async def test_openai_agents_answer_in_a_type(agents_model: agents.Model) -> None:
    settings = agents.ModelSettings(max_tokens=300)
    agent = agents.Agent(name="a", model=agents_model, output_type=Place, model_settings=settings)
    assert isinstance((await agents.Runner.run(agent, QUESTION)).final_output, Place)
