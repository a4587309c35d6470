# SPDX-License-Identifier: Apache-2.0
"""`POST /api/chat` and `POST /api/generate`."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiohttp import web

from pagoda.api.answers.conversation import begin_conversation
from pagoda.api.answers.generation import Generation
from pagoda.api.bodies.body import convert_body
from pagoda.api.bodies.fields import renamed
from pagoda.api.http.request_context import Caller, RequestContext
from pagoda.api.openai.bodies import ChatRequest, CompletionRequest
from pagoda.api.openai.completions import begin_completion
from pagoda.errors import refuse
from pagoda.plugins.ollama.answers import (
    OllamaAnswer,
    OllamaShape,
    spell_message,
    spell_response,
)
from pagoda.plugins.ollama.bodies import (
    NAMES,
    ChatBody,
    GenerateBody,
    GenerateFields,
    chat_messages,
    common_fields,
)
from pagoda.plugins.ollama.names import now, served_name


async def chat(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(ChatBody)
    if not body.messages:
        return _loaded(context, body, {"message": {"role": "assistant", "content": ""}})
    generation, shape = await begin_chat(context.caller, body)
    return await generation.respond(context, shape, streams=body.stream is not False)


async def generate(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(GenerateBody)
    if not (body.prompt or body.raw or body.suffix):
        return _loaded(context, body, {"response": ""})
    generation, shape = await begin_generate(context.caller, body)
    return await generation.respond(context, shape, streams=body.stream is not False)


def _loaded(
    context: RequestContext, body: GenerateFields, fields: dict[str, Any]
) -> web.StreamResponse:
    """The answer to a body without a prompt, which asks to load the model or to unload it."""
    if body.keep_alive in (0, "0", "0s", "0m"):
        refuse("keep_alive", "of 0 unloads a model, but the model of this server stays loaded")
    context.service.admit(served_name(context.service, body.model), context.client_request)
    answer = {"model": body.model, "created_at": now(), **fields, "done": True}
    return context.json({**answer, "done_reason": "load"})


async def begin_chat(caller: Caller, body: ChatBody) -> tuple[Generation, OllamaShape]:
    """Prepares an answer to a conversation, and its shape. Raises as `begin_conversation`."""
    messages = await caller.translate(partial(chat_messages, body.messages or []))
    fields = {"messages": messages, "tools": body.tools}
    return await _begin_conversation(caller, body, fields, is_chat=True)


async def begin_generate(caller: Caller, body: GenerateBody) -> tuple[Generation, OllamaShape]:
    """Prepares an answer to a prompt, and its shape. Raises as `begin_conversation`."""
    if body.template:
        refuse("template", "is not supported; the model has its own, see raw", "not_supported")
    if body.images:
        refuse("images", "are not supported: this server reads text only", "not_supported")
    if body.context:
        refuse("context", "is not supported; send the conversation to /api/chat", "not_supported")
    if not (body.raw or body.suffix):
        turns = [{"role": "user", "content": body.prompt}]
        if body.system:
            turns.insert(0, {"role": "system", "content": body.system})
        return await _begin_conversation(caller, body, {"messages": turns}, is_chat=False)
    if body.system:
        refuse("system", "needs the template; leave it out with raw: true or suffix")
    name = served_name(caller.service, body.model)
    generator = caller.service.admit(name, caller.client_request)
    fields = common_fields(
        body, generator.text, generator.endpoint.limits.max_model_len, caller.ignored
    )
    if body.think is not None:
        refuse("think", "needs the template; leave it out with raw: true or suffix")
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    with renamed({**NAMES, "logprobs": "top_logprobs"}):
        prompt = {"model": name, "prompt": body.prompt, "suffix": body.suffix}
        request = convert_body({**prompt, **fields}, CompletionRequest, caller.ignored)
        generation, _ = await begin_completion(caller, request, default_tokens=None)
    generation.rename_constraints(NAMES)
    answer = OllamaAnswer(
        generation,
        body.model,
        spell_response,
        reader=None,
        has_logprobs=bool(body.logprobs),
    )
    return generation, OllamaShape(answer)


async def _begin_conversation(
    caller: Caller, body: GenerateFields, fields: dict[str, Any], *, is_chat: bool
) -> tuple[Generation, OllamaShape]:
    name = served_name(caller.service, body.model)
    generator = caller.service.admit(name, caller.client_request)
    common = common_fields(
        body, generator.text, generator.endpoint.limits.max_model_len, caller.ignored
    )
    with renamed(NAMES):
        chat = {
            "model": name,
            **fields,
            **common,
            "logprobs": body.logprobs,
            "top_logprobs": body.top_logprobs if body.logprobs else None,
        }
        work = partial(convert_body, chat, ChatRequest, caller.ignored)
        request = await caller.translate(work)
        conversation = await begin_conversation(caller, request, clamp_max_tokens=True)
    conversation.generation.rename_constraints(NAMES)
    answer = OllamaAnswer(
        conversation.generation,
        body.model,
        spell_message if is_chat else spell_response,
        reader=conversation.readers[0],
        has_logprobs=bool(body.logprobs),
    )
    return conversation.generation, OllamaShape(answer)
