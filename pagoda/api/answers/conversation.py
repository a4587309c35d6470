# SPDX-License-Identifier: Apache-2.0
"""Conversations: from a chat body to its generation, and from text back to messages.

All APIs of conversations come here: each translates its body to a `ChatRequest`, and shows in its own shape the
`AnswerDelta`s that a `MessageReader` makes of the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from pagoda.api.answers.generation import Generation, TokenUsage, prepare
from pagoda.api.answers.output_parser import AnswerDelta, OutputParser
from pagoda.api.bodies.constraint_fields import constraint_of, constraint_size
from pagoda.api.bodies.fields import renamed
from pagoda.api.bodies.tool_choice import ToolSelection, new_call_id, served_tools, tool_choice_of
from pagoda.api.http.request_context import Caller
from pagoda.api.openai.bodies import ChatRequest, chat_logprobs_count, chat_max_tokens
from pagoda.api.parsers.deltas import delta_without_reasoning
from pagoda.concurrency.async_utils import LONG_TEXT_CHARS
from pagoda.errors import InvalidRequestError, refuse
from pagoda.messages.frontend import FinishReason
from pagoda.text.answer_formats import AnswerFormats, ReasoningFormat
from pagoda.text.draft import Draft, FieldGrammar
from pagoda.text.grammars.tool_grammars import answer_grammar
from pagoda.text.json_size import json_size
from pagoda.text.reasoning_border import ReasoningBorder
from pagoda.text.templates.chat_template import ChatTemplate
from pagoda.text.text_generator import TextDelta, TextGenerator

_EFFORTS_OF_HARMONY = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""The efforts that gpt-oss does not know, and the nearest that it does."""


class MessageReader:
    """Reads one answer as a message: content, reasoning and tool calls."""

    def __init__(
        self,
        parser: OutputParser,
        usage: TokenUsage,
        *,
        is_single_call: bool = False,
        call_reason: str = "tool_calls",
        shows_reasoning: bool = True,
        streams_reasoning: bool = True,
        reasoning_end_id: int | None = None,
    ) -> None:
        """`usage` is told of tokens of reasoning. `call_reason` is the finish reason of an answer that ends with
        calls. `reasoning_end_id` is the token of the tag behind reasoning, if it is one."""
        self.finish_reason: str | None = None
        """Reason in the words of OpenAI, `tool_calls` among them; None while the answer grows."""
        self.is_complete = False
        """The message has all that it may have, even if the engine goes on."""
        self._parser = parser
        self._usage = usage
        self._is_single_call = is_single_call
        self._call_reason = call_reason
        self._shows_reasoning = shows_reasoning
        self._streams_reasoning = streams_reasoning
        self._reasoning_end_id = reasoning_end_id
        self._held: list[AnswerDelta] = []
        """Reasoning that is shown in one piece, once it has ended."""

    @property
    def is_transparent(self) -> bool:
        """All further text is content, and a delta that does not end the answer need not be read."""
        return self._parser.transparent and not self._held

    def read(self, delta: TextDelta) -> AnswerDelta:
        """The parts of the message that a delta adds."""
        parser = self._parser
        was_in_reasoning = parser.in_reasoning
        parts = parser.push(delta.text)
        if was_in_reasoning or parser.in_reasoning:
            self._count_reasoning(delta.token_ids, has_ended=not parser.in_reasoning)
        self.finish_reason = delta.finish_reason
        # Asked before the end, which closes a call that `max_tokens` has cut off, too.
        is_enough = self._is_single_call and parser.one_call_complete
        if delta.finish_reason is not None:
            stopped = delta.finish_reason is FinishReason.STOP
            is_cut = not stopped or isinstance(delta.stop_reason, str)
            parts = AnswerDelta.joined((parts, parser.flush(is_cut=is_cut)))
        if self._is_single_call and parser.one_call_complete:
            parts = parts.first_call_only()
        if parser.num_calls and (is_enough or delta.finish_reason is FinishReason.STOP):
            self.finish_reason = self._call_reason
            self.is_complete = True
        if not self._shows_reasoning:
            parts = delta_without_reasoning(parts)
        return parts if self._streams_reasoning else self._held_back(parts)

    def _count_reasoning(self, token_ids: list[int], *, has_ended: bool) -> None:
        """Counts the tokens of a delta with reasoning, to the tag behind it if the reasoning has ended."""
        count = len(token_ids)
        if has_ended and self._reasoning_end_id in token_ids:
            count = token_ids.index(self._reasoning_end_id) + 1
        self._usage.num_reasoning_tokens = (self._usage.num_reasoning_tokens or 0) + count

    def _held_back(self, parts: AnswerDelta) -> AnswerDelta:
        """The parts, but for reasoning that has not ended."""
        if self._parser.in_reasoning and self.finish_reason is None:
            self._held.append(parts)
            return AnswerDelta()
        if self._held:
            parts = AnswerDelta.joined((*self._held, parts))
            self._held.clear()
        return parts


@dataclass(frozen=True)
class Conversation:
    """A chat body that is ready to be answered."""

    generation: Generation
    readers: list[MessageReader]
    """One for each request of the generation."""
    has_reasoning: bool
    """The model may think before it answers."""
    choice: ToolSelection
    num_earlier_calls: int
    """Tool calls in the messages before the answer."""

    def new_call_id(self, name: str, index: int) -> str:
        """An id for call `index` of the answer."""
        tool_format = self.choice.format_in(self.generation.generator.text.formats)
        return new_call_id(tool_format, name, self.num_earlier_calls + index)


async def begin_conversation(
    caller: Caller, body: ChatRequest, *, clamp_max_tokens: bool = False
) -> Conversation:
    """Renders a conversation and prepares its answers. `clamp_max_tokens` is as in `Draft`.
    Raises InvalidRequestError: a value is not as it must be; names the field. ApiError: as `Service.admit`."""
    body, names = served_tools(body, caller.ignored)
    with renamed(names):
        return await _begin(caller, body, clamp_max_tokens=clamp_max_tokens)


async def _begin(caller: Caller, body: ChatRequest, *, clamp_max_tokens: bool) -> Conversation:
    generator = caller.service.admit(body.model, caller.client_request)
    choice = tool_choice_of(body)
    prompt = await _render(generator, body, choice)
    formats = generator.text.formats
    border = _border(body, formats.reasoning, prompt)
    if body.best_of is not None and body.best_of != (body.n or 1) and not body.use_beam_search:
        refuse("best_of", "other than n is not supported for conversations", "not_supported")
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    with renamed(names):
        generation = await prepare(
            caller,
            body,
            generator,
            [prompt],
            {
                "max_tokens": chat_max_tokens(body),
                "logprobs": chat_logprobs_count(body),
                "prompt_logprobs": body.prompt_logprobs,
            },
            Draft(
                param="messages",
                add_special_tokens=bool(body.add_special_tokens),
                clamp_max_tokens=clamp_max_tokens,
                grammar=await generator.run_sized(
                    partial(_grammar, body, generator, choice, border),
                    constraint_size(body) + json_size(choice.tools, LONG_TEXT_CHARS),
                ),
                shown_tokens=formats.tokens(calls_tools=choice.calls_tools),
                border=border,
            ),
        )
    reasoning = None if body.separate_reasoning is False else border
    make_parser = partial(
        OutputParser,
        tool_format=choice.format_in(formats),
        reasoning=reasoning,
        tools=choice.tools,
    )
    usage = generation.usage
    usage.num_reasoning_tokens = 0
    token_id = generator.text.tokenizer.token_id
    make_reader = partial(
        MessageReader,
        usage=usage,
        is_single_call=choice.is_single,
        call_reason=choice.finish_reason,
        shows_reasoning=body.include_reasoning is not False,
        streams_reasoning=body.stream_reasoning is not False,
        reasoning_end_id=None if reasoning is None else token_id(reasoning.style.end[0]),
    )
    readers = [make_reader(make_parser()) for _ in generation.requests]
    num_calls = sum(len(message.tool_calls or ()) for message in body.messages)
    return Conversation(generation, readers, reasoning is not None, choice, num_calls)


async def count_prompt_tokens(caller: Caller, body: ChatRequest) -> int:
    """The tokens of a conversation, which may be longer than the context. Raises: as `begin_conversation`."""
    generator = caller.service.admit(body.model, caller.client_request)
    body, names = served_tools(body, caller.ignored)
    with renamed(names):
        prompt = await _render(generator, body, tool_choice_of(body))
    return len(
        await generator.encode(
            prompt, add_special_tokens=bool(body.add_special_tokens), param="messages"
        )
    )


async def _render(generator: TextGenerator, body: ChatRequest, choice: ToolSelection) -> str:
    """The prompt of a conversation."""
    template = generator.text.require_template()
    formats = generator.text.formats
    if choice.calls_tools and not generator.text.takes_tools:
        refuse(
            "tools", "are not in this model's chat template, and --tool-call-parser is not hermes"
        )
    if choice.calls_tools and choice.format_in(formats) is None:
        raise InvalidRequestError(
            "the chat template does not show how this model calls tools; the server's operator can say it with "
            "--tool-call-parser.",
            param="tools",
        )
    return await generator.render(
        body.messages,
        tools=choice.tools if choice.calls_tools else None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=_switches(body, template, formats),
    )


def _switches(
    body: ChatRequest, template: ChatTemplate, formats: AnswerFormats
) -> dict[str, Any] | None:
    """The switches of the template: those of the client, and those that `reasoning_effort` means.

    A template without such a switch has one effort, which is taken whatever is asked for, as vLLM does.
    """
    effort = body.reasoning_effort
    if effort is None:
        return body.chat_template_kwargs
    meant: dict[str, Any] = {
        "reasoning_effort": _EFFORTS_OF_HARMONY.get(effort, effort)
        if formats.tools == "openai"
        else effort,
        "enable_thinking": effort != "none",
        "thinking": effort != "none",
    }
    known = {name: value for name, value in meant.items() if name in template.switches}
    return known | (body.chat_template_kwargs or {})


def _border(
    body: ChatRequest, style: ReasoningFormat | None, prompt: str
) -> ReasoningBorder | None:
    """The border of the reasoning in the answer to `prompt`; None for a model that does not think."""
    if style is None:
        return None
    content = body.messages[-1].content if body.continue_final_message else None
    parts = [content or ""] if not isinstance(content, list) else [part.text for part in content]
    return ReasoningBorder.behind(style, prompt, "".join(parts))


def _grammar(
    body: ChatRequest,
    generator: TextGenerator,
    choice: ToolSelection,
    border: ReasoningBorder | None,
) -> FieldGrammar | None:
    """The grammar that the answer is held to for its calls, its content behind reasoning, or the bound of its
    reasoning; None without."""
    text = generator.text
    content = constraint_of(body)
    budget = None if border is None else body.thinking_token_budget
    is_held = content is not None or budget is not None
    rules = choice.rules(is_held=is_held and choice.calls_tools)
    if rules is None and budget is None and (content is None or border is None):
        return content
    whole = answer_grammar(
        text.tokenizer.added_token_id,
        text.formats,
        calls=rules,
        tool_format=choice.format_in(text.formats),
        reasoning=border,
        budget=budget,
        content=None if content is None else content.grammar,
    )
    others = "thinking_token_budget" if rules is None else "tools"
    return FieldGrammar(whole, others if content is None else content.param)
