# SPDX-License-Identifier: Apache-2.0
"""Text generation over an endpoint of tokens, for the HTTP API and for `LLM`."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import logging
import secrets
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import msgspec

from pagoda.concurrency.async_utils import LONG_TEXT_CHARS, LongWork, LoopBudget
from pagoda.errors import InvalidRequestError, refuse
from pagoda.faults.injector import Faults
from pagoda.fleet.adapters import AdapterRegistry
from pagoda.fleet.endpoint import BodyEndpoint
from pagoda.fleet.fleet import Fleet
from pagoda.messages.adapters import Adapter
from pagoda.messages.frontend import (
    FinishReason,
    GenerateRequest,
    KVSource,
    PromptLogprobs,
    TokenChunk,
    TokenLogprobs,
    Work,
)
from pagoda.messages.sampling_params import SamplingParams
from pagoda.telemetry.request_tracker import ClientRequest, RequestTracker
from pagoda.text.draft import Draft
from pagoda.text.json_size import json_size
from pagoda.text.model_text import ModelText
from pagoda.text.prompt_checks import PromptTooLongError, check_prompt, check_read, resolve
from pagoda.text.reasoning_border import BorderFinder, ReasoningBorder
from pagoda.text.stop import StopHit, StopMatcher, StopStrings
from pagoda.text.templates.conversation import Message, render_conversation, text_size, texts_of
from pagoda.text.tokenizers.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

T = TypeVar("T")

_PLAIN = Draft()
_MAX_LONG_TEXTS = 2
"""Long texts at a time; the tokenizer takes a hundred times their size in memory."""

_CHARS_OF_SCORE = 8
"""Characters of a text that takes as long as a log-probability."""


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    text: str
    """Empty if the chunk holds part of a character, or if a stop string may begin in the text."""
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    kv_source: KVSource | None = None
    """The place of the prompt's KV, in the last delta of a request with `holds_kv`."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of all prompt tokens but the first, in the first delta of a request that asks for them."""
    embedding: bytes | None = None
    """Vector of the prompt (`TokenChunk.embedding`), in the last delta of a request with `pooling`."""


def joined_deltas(deltas: Sequence[TextDelta]) -> TextDelta:
    """The deltas of one answer as one; `logprobs` is a list, which is empty if none were asked for."""
    return msgspec.structs.replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=[entry for delta in deltas for entry in delta.logprobs or ()],
        prompt_logprobs=deltas[0].prompt_logprobs,
    )


@dataclass(frozen=True)
class TextRequest:
    """One answer to one prompt: the endpoint's request, and how its tokens become text."""

    request: GenerateRequest
    sampling: SamplingParams
    """The user's parameters, with stop strings."""
    prompt: str | None
    client_request: ClientRequest
    read_token_ids: Sequence[int] = ()
    """Tokens of the prompt that the model's encoder reads, if it has one."""
    draft: Draft = _PLAIN
    stops: StopStrings | None = None
    """The automaton of `sampling.stop`; None without stop strings."""
    border: ReasoningBorder | None = None
    """Stop strings count behind it; None if they count in all of the text."""
    index: int = 0
    """Index among the `sampling.n` answers to the prompt; the first one counts the prompt's tokens."""
    on_kv_source: Callable[[KVSource], None] | None = None
    """Listener for the place of the prompt's KV, as soon as it is known; with `holds_kv`."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Tokens of the client's prompt."""
        return self.read_token_ids or self.request.prompt_token_ids


async def start_generator(
    fleet: Fleet, load: Callable[[], ModelText], tracker: RequestTracker
) -> TextGenerator:
    """Starts the engines and, at the same time, loads the text side of their model.
    Raises ConfigError: an engine cannot start, or the text side cannot be loaded; says why."""
    starting = asyncio.create_task(fleet.start())
    try:
        text = await asyncio.to_thread(load)
        _log.info("chat template: %s", text.template_traits)
        if text.not_followed:
            fields = ", ".join(text.not_followed)
            _log.warning("of generation_config.json these fields are not followed: %s", fields)
        await starting
        if text.decoder is not None:
            text.decoder.check_room(fleet.dispatcher.limits.max_model_len)
    except BaseException:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        raise
    return TextGenerator(fleet.dispatcher, text, tracker, fleet.adapters, fleet.faults)


class TextGenerator:
    """Turns prompts into requests, and tokens into text."""

    def __init__(
        self,
        endpoint: BodyEndpoint,
        text: ModelText,
        tracker: RequestTracker,
        adapters: AdapterRegistry | None = None,
        faults: Faults | None = None,
        name: str = "",
    ) -> None:
        """`faults` are those of this process; `name` is the model's where a server has several."""
        self._tokenize = (faults or Faults(None)).before("frontend.tokenize", text.tokenizer.encode)
        self.adapters = adapters or AdapterRegistry()
        self.name = name
        self.adapter: Adapter | None = None
        """The adapter that answers; None for the model alone."""
        self.endpoint = endpoint
        self.text = text
        self.tracker = tracker
        self.long_texts = LongWork(_MAX_LONG_TEXTS)
        self.tenant = ""
        """Name of the API key on whose behalf long texts are worked on."""
        self._budget: LoopBudget | None = None
        """Budget of the body whose texts these are; None gives each text one of its own."""
        self._stops: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()

    def with_adapter(self, adapter: Adapter) -> TextGenerator:
        """The same generator, whose answers come from an adapter."""
        adapted = copy.copy(self)
        adapted.adapter = adapter
        return adapted

    def of_client(self, client_request: ClientRequest) -> TextGenerator:
        """The same generator for one body: its texts together have one budget of the event loop, and beyond it
        wait in the line of the client's API key."""
        own = copy.copy(self)
        own.tenant = client_request.key_name
        own._budget = client_request.budget
        return own

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens of the longest answer to a prompt of these tokens; less than 1 if the prompt is too long."""
        context, decoder = self.endpoint.limits.max_model_len, self.text.decoder
        if decoder is not None and len(prompt) <= context:
            return context - len(decoder.prompt)
        return context - len(prompt)

    async def encode(
        self, text: str, *, add_special_tokens: bool, param: str = "prompt"
    ) -> list[int]:
        """Token ids of `text`; `param` is the client's name for it in errors.

        Raises PromptTooLongError: `text` is so long that no tokens that fit the context could spell it;
        InvalidRequestError: `text` is not valid Unicode.
        """
        self.check_length(text, param)
        return await self.tokenize(text, add_special_tokens=add_special_tokens)

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, however long. Raises InvalidRequestError: `text` is not valid Unicode."""
        work = partial(self._tokenize, text, add_special_tokens=add_special_tokens)
        return await self.run_sized(work, len(text))

    def check_length(self, text: str, param: str) -> None:
        """Raises PromptTooLongError: `text` is so long that no tokens that fit the context could spell it."""
        longest_token = self.text.tokenizer.longest_token_chars
        context = self.endpoint.limits.max_model_len
        most = context * longest_token
        if len(text) > most:
            raise PromptTooLongError(
                f"{param} has {len(text)} characters and is longer than the model's context length allows: "
                f"This model's maximum context length is {context} tokens, which hold {most} at most"
                f"{self._more_context()}.",
                param=param,
                num_tokens=-(-len(text) // longest_token),
                context=context,
            )

    def _more_context(self) -> str:
        """The flag to raise where the server takes shorter sequences than the model can; else empty."""
        longest = self.text.longest
        if longest <= self.endpoint.limits.max_model_len:
            return ""
        return (
            f" (the model can take {longest} tokens; --max-model-len of this server allows fewer)"
        )

    async def render(self, messages: Sequence[Message], **options: Any) -> str:
        """The prompt of a conversation; `options` are those of `render_conversation`.
        Raises InvalidRequestError: a message, a tool or a switch is not as it must be."""
        work = partial(self._rendered, messages, **options)
        size = text_size(messages, options.get("tools"))
        size += json_size(options.get("chat_template_kwargs"), LONG_TEXT_CHARS)
        return await self.run_sized(work, size)

    def _rendered(self, messages: Sequence[Message], **options: Any) -> str:
        template = self.text.require_template()
        prompt = render_conversation(template, messages, **options)  # its checks bound the texts
        if self.text.special_tokens_in_text == "reject":
            switches = options.get("chat_template_kwargs")
            for param, text in texts_of(messages, options.get("tools"), switches):
                token = self.text.tokenizer.special_token_in(text)
                if token is not None:
                    refuse(param, f"holds the special token {token!r}, which texts here must not")
        return prompt

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special tokens included."""
        work = partial(self.text.tokenizer.decode, token_ids, skip_special_tokens=False)
        return await self.run_sized(work, len(token_ids))

    async def spell(self, token_ids: Sequence[int]) -> list[str]:
        spell = self.text.tokenizer.token
        return await self.run_sized(lambda: list(map(spell, token_ids)), len(token_ids))

    async def run_sized(self, work: Callable[[], T], size: int) -> T:
        """Does work that takes as long as a text of `size` characters, as `LongWork.run_sized` does."""
        budget = self._budget or LoopBudget()
        return await self.long_texts.run_sized(work, size, budget, self.tenant)

    def check_sampling(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters in the form that `prepare` takes. Called once for all prompts of a body.
        Raises InvalidRequestError: a value is out of range or does not fit the model; names the field."""
        sampling = sampling.checked()
        limits = self.endpoint.limits
        vocab_size = limits.vocab_size
        sampling = sampling.check_logprobs(limits.max_logprobs, vocab_size)
        sampling.check_vocabulary(vocab_size)
        sampling.check_min_tokens(vocab_size, self._eos_of(sampling))
        return sampling

    async def _stops_of(self, sampling: SamplingParams) -> StopStrings:
        stops = self._stops.get(sampling.stop)
        if stops is None:
            size = sum(map(len, sampling.stop))
            stops = await self.run_sized(partial(StopStrings, sampling.stop), size)
            self._stops[sampling.stop] = stops
        return stops

    def _eos_of(self, sampling: SamplingParams) -> tuple[int, ...]:
        return () if sampling.ignore_eos else self.text.eos_token_ids

    async def prepare(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        draft: Draft = _PLAIN,
    ) -> list[TextRequest]:
        """The `sampling.n` requests of one prompt, checked against the endpoint's limits. Other streams go on
        between the prompts of a long list.

        `sampling` is what `check_sampling` returned. Token ids are not copied: the caller must not change them.

        Raises InvalidRequestError: the prompt does not fit the model; names the field.
        """
        await asyncio.sleep(0)
        if draft.pooling is None:
            self.text.check_generates()
        limits = self.endpoint.limits
        if draft.audio is None and limits.feature_bytes:
            refuse("model", "transcribes audio; ask POST /v1/audio/transcriptions")
        client_request = draft.client_request
        if client_request is None:
            client_request = ClientRequest(id=uuid.uuid4().hex, arrived_ns=self.tracker.clock_ns())
        client_request.check_priority(draft.priority)
        text, token_ids, param = None, prompt, draft.param
        if isinstance(prompt, str):
            text = prompt
            token_ids = await self.encode(
                prompt, add_special_tokens=draft.add_special_tokens, param=param
            )
        token_ids = cast(list[int], token_ids)
        more, decoder = self._more_context(), self.text.decoder
        has_answer = sampling.max_tokens != 0 and decoder is None
        check_prompt(token_ids, limits, param, more, has_answer=has_answer)
        read, beside, never = list[int](), draft.audio, tuple[int, ...]()
        if decoder is not None:
            check_read(sampling, draft)
            (token_ids, beside), read, never = decoder.begin(token_ids), token_ids, decoder.never
        clamp, context = draft.clamp_max_tokens, limits.max_model_len
        resolved = resolve(sampling, len(token_ids), context, more, clamp=clamp)
        stops = await self._stops_of(sampling) if sampling.stop else None
        border = draft.border
        if border is not None and any(map(border.names_a_tag, sampling.stop)):
            border = None  # to stop at a tag of reasoning is to search all of the text
        base = resolved.seed if resolved.seed is not None else secrets.randbits(64)
        scores_once = draft.scores_once
        return [
            TextRequest(
                request=GenerateRequest(
                    # Clients choose their ids, so several requests may have the same.
                    request_id=f"{client_request.id}-{secrets.token_hex(8)}",
                    prompt_token_ids=token_ids,
                    work=Work(
                        msgspec.structs.replace(
                            resolved,
                            seed=derive_seed(base, index),
                            prompt_logprobs=None
                            if index and scores_once
                            else resolved.prompt_logprobs,
                        ),
                        eos_token_ids=self._eos_of(sampling),
                        pooling=draft.pooling,
                        adapter=self.adapter.digest if self.adapter else "",
                        second_text_at=draft.second_text_at,
                        spans=draft.spans,
                        encoder_input=beside,
                        speech=draft.speech,
                        alignment=draft.alignment,
                        never=never,
                    ),
                    priority=draft.priority,
                    tenant=client_request.key_name,
                    weight=client_request.weight,
                    body=client_request.body_id,
                    cache_salt=draft.cache_salt,
                    speculates=draft.speculates and draft.speech is None,
                    session=draft.session,
                    data_parallel_rank=client_request.data_parallel_rank,
                    holds_kv=draft.holds_kv,
                    kv_source=draft.kv_source,
                    grammar=None if draft.grammar is None else draft.grammar.grammar,
                    num_scored_tokens=draft.num_scored_tokens,
                ),
                sampling=sampling,
                prompt=text,
                client_request=client_request,
                read_token_ids=read,
                draft=draft,
                stops=stops,
                border=border,
                index=index,
            )
            for index in range(sampling.n)
        ]

    async def stream(self, request: TextRequest) -> AsyncGenerator[TextDelta, None]:
        """The answer as it grows; the last delta has a finish reason. Closing the generator aborts the request.
        Raises OverloadedError, DeadlineError, EngineDeadError: as `Endpoint.generate`; InvalidRequestError: the
        grammar is wrong, or takes too much work; names the client's field."""
        tracker = self.tracker
        assembler = TextAssembler(self.text.tokenizer, request)
        source: KVSource | None = None
        scores = None if request.request.work.sampling.prompt_logprobs is None else PromptScores()
        with (
            _naming_grammar(request),
            tracker.answering(request.request, request.client_request) as record,
        ):
            value = record.with_span(request.request)
            value = record.with_time_left(value, tracker.clock_ns())
            chunks = cast(AsyncGenerator[TokenChunk, None], self.endpoint.generate(value))
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    if chunk.kv_source is not None:
                        source = chunk.kv_source
                        if request.on_kv_source is not None:
                            request.on_kv_source(source)
                    if scores is not None and chunk.prompt_logprobs is not None:
                        scores.add(chunk.prompt_logprobs)
                    if not chunk.token_ids and chunk.finish_reason is None:
                        tracker.on_chunk(record, chunk, 0)
                        continue
                    received_ns = tracker.clock_ns() if tracker.delivery_listeners else 0
                    delta = assembler.push(chunk)
                    tracker.on_chunk(record, chunk, len(delta.token_ids))
                    decoded_ns = tracker.clock_ns() if received_ns else 0
                    if delta.finish_reason is not None:
                        record.ending = delta.finish_reason, delta.error or ""
                        if (field := chunk.blamed_field) and delta.error is not None:
                            # `_naming_grammar` has the client's name of a grammar's field.
                            param = None if field == "grammar" else field
                            raise InvalidRequestError(delta.error, param=param)
                        embedding = chunk.embedding
                        delta = msgspec.structs.replace(
                            delta, kv_source=source, embedding=embedding
                        )
                    if scores is not None:
                        entries = await self.run_sized(
                            scores.entries, _CHARS_OF_SCORE * scores.size
                        )
                        delta = msgspec.structs.replace(delta, prompt_logprobs=entries)
                        scores = None
                    yield delta
                    if received_ns:
                        written_ns = tracker.clock_ns()
                        for listener in list(tracker.delivery_listeners):
                            listener(record, received_ns, decoded_ns, written_ns)
                    if delta.finish_reason is not None:
                        return


class PromptScores:
    """The log-probabilities of a prompt as they come; those that come twice count once."""

    def __init__(self) -> None:
        self._parts: list[PromptLogprobs] = []
        self._end = 1

    def add(self, part: PromptLogprobs) -> None:
        if part.end > self._end:
            self._parts.append(part.since(self._end))
            self._end = part.end

    @property
    def size(self) -> int:
        """Log-probabilities that have come."""
        return sum(len(part.ranks) // 4 * (1 + part.num_top) for part in self._parts)

    def entries(self) -> list[TokenLogprobs]:
        return [entry for part in self._parts for entry in part.entries()]


@contextlib.contextmanager
def _naming_grammar(request: TextRequest) -> Iterator[None]:
    """Lets a refusal of the request's grammar name the client's field."""
    try:
        yield
    except InvalidRequestError as error:
        grammar = request.draft.grammar
        if grammar is None or error.param is not None:
            raise
        param = grammar.param
        raise InvalidRequestError(f"{param}: {error}", param=param) from None


def derive_seed(seed: int, index: int) -> int:
    """The seed of answer `index` of several to one prompt; the first answer is that of a single request."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed % 2**64}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


class TextAssembler:
    """The text of one answer, chunk by chunk: characters are never split, stop strings end it."""

    def __init__(self, tokenizer: Tokenizer, request: TextRequest) -> None:
        sampling = request.sampling
        self._decoder = tokenizer.incremental(
            request.request.prompt_token_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            shown_tokens=request.draft.shown_tokens,
        )
        self._matcher = StopMatcher(request.stops) if request.stops else None
        border = request.border if request.stops else None
        self._finder = None if border is None else BorderFinder(border)
        self._keep_stop = sampling.include_stop_str_in_output
        self._shows_special = not sampling.skip_special_tokens
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0

    def push(self, chunk: TokenChunk) -> TextDelta:
        token_ids = chunk.token_ids
        reason = chunk.finish_reason
        if reason is None and self._matcher is None and len(token_ids) == 1:
            text = self._decoder.push(token_ids[0])
            return TextDelta(text, token_ids, None, None, chunk.logprobs, chunk.num_cached_tokens)
        text = ""
        # The token that ended the answer is not part of its text, as a stop string is not.
        # An end token of the model is shown to those who want special tokens.
        shows_end = self._keep_stop or (self._shows_special and chunk.stop_reason is None)
        silent_end = reason is FinishReason.STOP and not shows_end
        for position, token_id in enumerate(token_ids, start=1):
            if silent_end and position == len(token_ids):
                break
            piece = self._search(self._decoder.push(token_id))
            if isinstance(piece, StopHit):
                return self._stopped(chunk, text, piece, position)
            text += piece
        if reason is not None:
            piece = self._search(self._decoder.flush(), at_end=True)
            if isinstance(piece, StopHit):
                return self._stopped(chunk, text, piece, len(token_ids))
            text += piece
        return TextDelta(
            text,
            token_ids,
            reason,
            chunk.stop_reason,
            chunk.logprobs,
            chunk.num_cached_tokens,
            chunk.error,
        )

    def _search(self, piece: str, *, at_end: bool = False) -> str | StopHit:
        """The text that is certain, or the first stop string: behind the border, and behind `min_tokens`."""
        if self._matcher is None:
            return piece
        self._num_tokens += not at_end
        parts = [(piece, True)]
        if self._finder is not None:
            parts = self._finder.push(piece)
            if at_end:
                parts += self._finder.flush()
        counts = at_end or self._num_tokens > self._min_tokens
        text = ""
        for part, is_searched in parts:
            if not is_searched:
                text += self._matcher.flush() + part
                continue
            found = self._matcher.push(part, counts=counts)
            if isinstance(found, StopHit):
                return StopHit(text + found.text, found.stop)
            text += found
        return text + self._matcher.flush() if at_end else text

    def _stopped(self, chunk: TokenChunk, text: str, hit: StopHit, position: int) -> TextDelta:
        kept = hit.text + hit.stop if self._keep_stop else hit.text
        return TextDelta(
            text + kept,
            chunk.token_ids[:position],
            FinishReason.STOP,
            hit.stop,
            chunk.logprobs[:position] if chunk.logprobs is not None else None,
            chunk.num_cached_tokens,
        )
