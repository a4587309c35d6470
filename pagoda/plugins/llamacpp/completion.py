# SPDX-License-Identifier: Apache-2.0
"""`POST /completion` and `POST /infill`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from aiohttp import web

from pagoda.api.answers.generation import Generation
from pagoda.api.bodies.body import convert_body
from pagoda.api.bodies.fields import renamed
from pagoda.api.bodies.list_shape import ListShape
from pagoda.api.errors import ApiError, context_exceeded
from pagoda.api.http.request_context import Caller, RequestContext
from pagoda.api.infill import InfillMarks, infill_prompt, known_tokens, marks_of
from pagoda.api.openai.bodies import MAX_SEQUENCES_PER_BODY, CompletionRequest
from pagoda.api.openai.completions import begin_completion
from pagoda.errors import refuse
from pagoda.plugins.llamacpp.answers import LlamaAnswer, PreparedCompletion
from pagoda.plugins.llamacpp.bodies import (
    NAMES,
    CompletionBody,
    ExtraFile,
    InfillBody,
    SamplingFields,
    length_of,
    prompts_of,
    request_fields,
)
from pagoda.text.text_generator import TextGenerator, TextRequest

_FILE_TOKENS = (("<|repo_name|>", "<|file_sep|>"), ("<reponame>", "<file_sep>"))


async def completion(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(CompletionBody)
    generator = context.service.admit(body.model, context.client_request)
    prompts = await prompts_of(body.prompt, generator)
    is_list = len(prompts) > 1 or (
        isinstance(body.prompt, list) and int not in set(map(type, body.prompt))
    )
    return await _respond(context, body, prompts, is_list=is_list)


async def infill(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(InfillBody)
    generator = context.service.admit(body.model, context.client_request)
    marks = marks_of(generator.text.tokenizer)
    if marks is None:
        raise ApiError(400, "Infill is not supported by this model: it has no tokens for it.")
    prompt = await _infill_prompt(body, generator, marks)
    return await _respond(context, body, [prompt], is_list=False, ends=marks.ends)


async def _respond(
    context: RequestContext,
    body: SamplingFields,
    prompts: Sequence[list[int]],
    *,
    is_list: bool,
    ends: Sequence[int] = (),
) -> web.StreamResponse:
    generation, shape = await begin_llama(context.caller, body, prompts, is_list=is_list, ends=ends)
    return await generation.respond(context, shape, streams=bool(body.stream))


async def begin_llama(
    caller: Caller,
    body: SamplingFields,
    prompts: Sequence[list[int]],
    *,
    is_list: bool,
    ends: Sequence[int] = (),
) -> tuple[Generation, ListShape]:
    """Prepares the answers to prompts, and their shape; `ends` are tokens that end them, besides the model's.
    Raises InvalidRequestError: a value is not as it must be; names the field. ApiError: as `Service.admit`."""
    generator = caller.service.admit(body.model, caller.client_request)
    limits = generator.endpoint.limits
    total = len(prompts) * (body.n or body.n_cmpl or 1)
    if total > MAX_SEQUENCES_PER_BODY:
        rule = f"asks for {total} answers in one body; at most {MAX_SEQUENCES_PER_BODY} are served"
        refuse("prompt", rule)
    requests: list[TextRequest] = []
    texts: list[str] = []
    with renamed(NAMES):
        fields = await request_fields(body, generator, caller.ignored)
        for prompt in prompts:
            room = generator.room(prompt)
            if room < 1:
                raise context_exceeded(
                    f"the request ({len(prompt)} tokens) exceeds the available context size "
                    f"({limits.max_model_len} tokens), the maximum context length of prompt and answer.",
                    "prompt",
                    len(prompt),
                    limits.max_model_len,
                )
            request = {**fields, "prompt": prompt, "max_tokens": length_of(body, room)}
            request["stop_token_ids"] = list(ends)
            work = partial(convert_body, request, CompletionRequest, caller.ignored)
            begun, _ = await begin_completion(caller, await caller.translate(work))
            begun.rename_constraints(NAMES)
            requests += begun.requests
            texts += [await generator.decode(prompt)] * len(begun.requests)
    generation = Generation(generator, requests)
    asked = PreparedCompletion(
        body,
        body.model or caller.service.config.served_model_name,
        limits.max_model_len,
        generator.text.eos_token_ids,
    )
    answers = [LlamaAnswer(generation, index, asked, text) for index, text in enumerate(texts)]
    return generation, ListShape(answers, is_list=is_list or len(requests) > 1)


async def _infill_prompt(
    body: InfillBody, generator: TextGenerator, marks: InfillMarks
) -> list[int]:
    """The prompt for the gap between prefix and suffix."""

    async def encode(text: str, param: str) -> list[int]:
        return await generator.encode(text, add_special_tokens=False, param=param)

    before = await encode(body.input_prefix, "input_prefix")
    behind = await encode(body.input_suffix, "input_suffix")
    extra = await _extra_prompt(body.input_extra or (), generator)
    prompt = await infill_prompt(generator, marks, before, behind, extra)
    return [*prompt, *await encode(body.prompt or "", "prompt")]


async def _extra_prompt(files: Sequence[ExtraFile], generator: TextGenerator) -> list[int]:
    """Further files of the project, in the form that Qwen2.5-Coder was trained with, or else as text."""
    if not files:
        return []
    marks = known_tokens(generator.text.tokenizer, _FILE_TOKENS)
    token_ids: list[int] = []
    if marks is not None:
        token_ids.append(marks[0])
        token_ids += await generator.encode("project\n", add_special_tokens=False)
    for file in files:
        head = f"\n--- {file.filename} ---\n"
        if marks is not None:
            token_ids.append(marks[1])
            head = f"{file.filename}\n"
        text = f"{head}{file.text}\n"
        token_ids += await generator.encode(text, add_special_tokens=False, param="input_extra")
    if marks is not None:
        token_ids.append(marks[1])
        token_ids += await generator.encode("filename\n", add_special_tokens=False)
    return token_ids
