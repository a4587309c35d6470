"""Conversations: from a chat body to its generation, and from text back to messages.

All APIs of conversations come here: each translates its body to a `ChatRequest`, and shows in its own shape the
`AnswerDelta`s that a `MessageReader` makes of the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from pagoda.api.fields import renamed
from pagoda.api.generation import Generation, prepare
from pagoda.api.openai.bodies import ChatRequest, Tools, chat_logprobs_count, chat_max_tokens
from pagoda.api.output_parser import AnswerDelta, OutputParser
from pagoda.api.request_context import Caller
from pagoda.errors import InvalidRequestError
from pagoda.frontend.text_generator import TextDelta, TextGenerator
from pagoda.messages.frontend import FinishReason


class MessageReader:
    """Reads one answer as a message: content, reasoning and tool calls."""

    def __init__(self, parser: OutputParser, *, is_single_call: bool) -> None:
        self.finish_reason: str | None = None
        """Reason in the words of OpenAI, `tool_calls` among them; None while the answer grows."""
        self.is_complete = False
        """The message has all that it may have, even if the engine goes on."""
        self._parser = parser
        self._is_single_call = is_single_call

    @property
    def is_transparent(self) -> bool:
        """All further text is content, and a delta that does not end the answer need not be read."""
        return self._parser.transparent

    def read(self, delta: TextDelta) -> AnswerDelta:
        """The parts of the message that a delta adds."""
        parser = self._parser
        parts = parser.push(delta.text)
        self.finish_reason = delta.finish_reason
        if delta.finish_reason is not None:
            parts = AnswerDelta.joined((parts, parser.flush()))
        is_enough = self._is_single_call and parser.one_call_complete
        if is_enough:
            parts = parts.first_call_only()
        if parser.num_calls and (is_enough or delta.finish_reason is FinishReason.STOP):
            self.finish_reason = "tool_calls"
            self.is_complete = True
        return parts


@dataclass(frozen=True)
class Conversation:
    """A chat body that is ready to be answered."""

    generation: Generation
    readers: list[MessageReader]
    """One for each request of the generation."""
    has_reasoning: bool
    """The model may think before it answers."""


async def begin_conversation(
    caller: Caller, body: ChatRequest, *, clamp_max_tokens: bool = False
) -> Conversation:
    """Renders a conversation and prepares its answers. `clamp_max_tokens` is as in `TextGenerator.prepare`.
    Raises InvalidRequestError: a value is not as it must be; names the field. ApiError: as `Service.admit`."""
    generator = caller.service.admit(body.model)
    prompt = await _render(generator, body)
    template = generator.text.require_template()
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    with renamed(names):
        generation = await prepare(
            caller,
            body,
            generator,
            [prompt],
            max_tokens=chat_max_tokens(body),
            logprobs=chat_logprobs_count(body),
            prompt_logprobs=body.prompt_logprobs,
            add_special_tokens=bool(body.add_special_tokens),
            clamp_max_tokens=clamp_max_tokens,
            param="messages",
        )
    thinks = template.thinks and body.separate_reasoning is not False
    make_parser = partial(
        OutputParser,
        thinks=thinks,
        in_reasoning=thinks and prompt.rstrip().endswith("<think>"),
        calls_tools=bool(_tools_of(body)),
    )
    is_single_call = body.parallel_tool_calls is False
    readers = [
        MessageReader(make_parser(), is_single_call=is_single_call) for _ in generation.requests
    ]
    return Conversation(generation, readers, thinks)


async def count_prompt_tokens(caller: Caller, body: ChatRequest) -> int:
    """The tokens of a conversation, which may be longer than the context. Raises: as `begin_conversation`."""
    generator = caller.service.admit(body.model)
    prompt = await _render(generator, body)
    return len(
        await generator.encode(
            prompt, add_special_tokens=bool(body.add_special_tokens), param="messages"
        )
    )


def _tools_of(body: ChatRequest) -> Tools | None:
    """The tools that the answer may call."""
    return body.tools if body.tool_choice != "none" else None


async def _render(generator: TextGenerator, body: ChatRequest) -> str:
    """The prompt of a conversation."""
    template = generator.text.require_template()
    tools = _tools_of(body)
    if tools and template.takes_tools and not template.hermes_tool_calls:
        raise InvalidRequestError(
            "the way in which this model calls tools is not supported yet; only <tool_call> is.",
            param="tools",
        )
    return await generator.render(
        body.messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
