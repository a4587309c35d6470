# SPDX-License-Identifier: Apache-2.0
"""The wire between a frontend and an engine: requests go one way, token chunks come back.

Routers and hosts speak the same messages.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pagoda.messages.adapters import AdapterLoaded, LoadAdapter, UnloadAdapter
from pagoda.messages.audio import Alignment, SpeechRules
from pagoda.messages.encoder_input import EncoderInput
from pagoda.messages.kv_groups import KVGroup
from pagoda.messages.load import LoadReport
from pagoda.messages.ranges import (
    MAX_COUNT,
    MAX_ITEMS,
    Count,
    Logprob,
    Name,
    Place,
    Seconds,
    Sentence,
    Size,
)
from pagoda.messages.sampling_params import (
    ALL_LOGPROBS,
    DEFAULT_MAX_LOGPROBS,
    MAX_ALLOWED_TOKENS,
    SamplingParams,
    TokenId,
)
from pagoda.messages.spans import EmbeddedSpan
from pagoda.messages.tracing import StartTrace, StopTrace, TraceStopped
from pagoda.messages.worker_config import Role

PROTOCOL_VERSION = 28
"""Version of this wire, raised whenever a message changes in a way that an older process would misread."""
MAX_ROUTERS = 1024
"""Ids of routers that a host names."""
MAX_POOLS = 256
"""Pools of a router, each of which serves one model."""


class FinishReason(enum.StrEnum):
    """Reason for which a request ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class KVSource(msgspec.Struct, frozen=True, kw_only=True):
    """Address of a prompt's KV: the engine that computes or holds it."""

    address: Name
    """`tcp://host:port` of that engine's listener."""
    engine_id: Name
    """New at each start of that engine."""
    transfer_id: Name
    """Id of the KV in that engine, never used twice."""
    tp_size: Size = 1
    """Tensor-parallel size of that engine, for proxies that ask. Its workers say what each of them has."""
    block_ids: tuple[Place, ...] = ()
    """Full blocks of the prompt, once it is computed; for proxies that pass such a list on."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """Language of an answer, in a dialect of llguidance: every token that is sampled stays within it."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class Pooling(enum.StrEnum):
    """Way from the hidden states of a prompt's tokens to one vector."""

    LAST = "last"
    """The hidden state of the last token."""
    MEAN = "mean"
    FIRST = "cls"
    """The hidden state of the first token, which encoders begin texts with for that."""
    ALL = "all"
    """The hidden states of all tokens, one behind the other."""
    WEIGHTS = "weights"
    """The weight of each token in its text (BGE-M3)."""
    SPARSE = "sparse"
    """The weight of each token of the vocabulary (SPLADE)."""
    SCORE = "score"
    """The scores that the model's head gives the text for one of its tokens, instead of a hidden state."""
    SCORE_ALL = "score_all"
    """The scores that the model's head gives the text for all of its tokens, or those of each token."""
    PLACES = "places"
    """The place in the audio at which each token of `Work.alignment` is left for the next one."""


class Work(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The part of a request that workers read. It is made once, where the request is, and reaches them unchanged.

    `sampling.seed` and `sampling.max_tokens` are resolved (not None), and `eos_token_ids` are the model's
    (empty with `ignore_eos`), so that engines and workers need no tokenizer and no defaults.
    """

    sampling: SamplingParams
    eos_token_ids: tuple[TokenId, ...] = ()
    pooling: Pooling | None = None
    """The answer is a vector (`TokenChunk.embedding`); `sampling.max_tokens` is 0."""
    adapter: str = ""
    """Digest of the adapter that answers (`Adapter.digest`); empty for the model alone."""
    second_text_at: Count = 0
    """Place of the first token of the second of two texts, where encoders tell them apart; 0 for one text."""
    spans: Annotated[tuple[EmbeddedSpan, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Parts of the prompt that are no tokens, in their order."""
    encoder_input: EncoderInput | None = None
    """Audio or text that the request is about, of a model that has an encoder for it."""
    speech: SpeechRules | None = None
    """Tokens that a transcript may have; None of an answer that is none."""
    alignment: Alignment | None = None
    """Tokens whose places in the audio are wanted; with `Pooling.PLACES`."""
    never: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_ALLOWED_TOKENS)] = ()
    """Tokens that no answer of the model has (`bad_words_ids`)."""


class GenerateRequest(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate"
):
    """A request as a value: with these fields alone, any replica continues the answer token for token."""

    request_id: str
    """Id in logs and traces; the same in all processes."""
    prompt_token_ids: list[TokenId]
    work: Work
    output_token_ids: list[TokenId] = []
    """Tokens so far, behind which the receiver goes on."""
    priority: int = 0
    """Lower comes first, as in vLLM."""
    cache_salt: str | None = None
    """Requests with different ones share no KV; see `salt`."""
    tenant: str = ""
    """Name of the API key, among which an engine shares out tokens of the same priority; empty without keys."""
    weight: Annotated[float, msgspec.Meta(ge=0.01, le=100.0)] = 1.0
    """Share of the tenant beside those of others that want more than there is."""
    timeout_s: Annotated[float, msgspec.Meta(ge=0.0, le=86400.0)] | None = None
    """Seconds from when the receiver has the request until it ends, complete or not; None for no deadline. What is
    left goes on with the request: clocks of hosts are not compared."""
    returns: bool = False
    """An engine took this request before, so it is not refused for want of room."""
    session: str | None = None
    """Requests of the same session may be served by the same replica; has no effect on the answer."""
    data_parallel_rank: Annotated[int, msgspec.Meta(ge=0, le=2**16)] | None = None
    """Number of the replica that the request goes to while that takes requests; None leaves the choice to the
    policy. Has no effect on the answer."""
    holds_kv: bool = False
    """The answer ends with its next token; the prompt's KV is held for another engine (`TokenChunk.kv_source`)."""
    kv_source: KVSource | None = None
    """Source of the prompt's KV and of the first token. KV that does not come is computed."""
    traceparent: str | None = None
    """Parent span, as `tracestate` in the form of https://www.w3.org/TR/trace-context/."""
    tracestate: str | None = None
    grammar: Grammar | None = None
    """Language that the answer is held to. The engine compiles it, and refuses one that is wrong or too large."""
    num_scored_tokens: Count = 0
    """Leading prompt tokens whose log-probabilities (`sampling.prompt_logprobs`) the sender has already."""
    body: str = ""
    """Id that all requests of one body of a client share, and no other; empty for a request of its own."""
    speculates: bool = True
    """False if no drafts are wanted. Has no effect on the answer."""
    via: str = ""
    """The router that has sent the request, as the host that it came to numbers routers; empty for its own."""
    wire_id: str = ""
    """Id that chunks, refusals and aborts name the request by; a sender uses none twice. Empty: `request_id`."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the client's prompt: those of the text that the model's encoder reads, if it reads one."""
        beside = self.work.encoder_input
        return (0 if beside is None else beside.num_tokens) or len(self.prompt_token_ids)

    @property
    def num_prompt_positions(self) -> int:
        """Positions to compute before the answer: the decoder's prompt, and what the encoder computes."""
        beside = self.work.encoder_input
        return len(self.prompt_token_ids) + (0 if beside is None else beside.positions)

    @property
    def salt(self) -> str | None:
        """The salt of the keys of the request's blocks: KV of tokens depends on what is encoded beside them."""
        beside = self.work.encoder_input
        return (
            self.cache_salt if beside is None else f"{beside.digest.hex()}{self.cache_salt or ''}"
        )


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Forget the requests with these wire ids; unknown ids are ignored. No chunk follows for them."""

    request_ids: list[str]


class PoolModel(msgspec.Struct, frozen=True):
    """A pool of a router, and the model that its hosts serve."""

    pool: Name
    """Name of the pool, which clients ask for; empty for the only one of a router of one model."""
    model: Name
    digest: Name
    """Digest of tokenizer and weights; equal where answers are alike."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A frontend's first message; answered by `EngineReady` as soon as the engine is.

    A host joins one of a router's `pools`, or refuses a router that has none for it; an engine reads the version
    alone.
    """

    protocol_version: int = PROTOCOL_VERSION
    pools: Annotated[tuple[PoolModel, ...], Meta(max_length=MAX_POOLS)] = ()


class HostWork(msgspec.Struct, frozen=True, tag="work"):
    """The work of a host for others than the router that is told, whenever that has changed by much."""

    pending_tokens: Count


class HostPool(msgspec.Struct, frozen=True, tag="pool"):
    """A host's answer to `Hello`, before its limits: the router's pool that it belongs to, and where it is."""

    pool: Name
    region: Name = ""
    """The operator's name for the place of the host."""
    price: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    """Cost of the host beside others, in the operator's unit."""


class LoadQuery(msgspec.Struct, frozen=True, tag="load"):
    """Asks for a `LoadReport`."""

    query_id: Count


class SubscribeCache(msgspec.Struct, frozen=True, tag="subscribe_cache"):
    """Asks for `PrefixCacheUpdate`s until `UnsubscribeCache`, the first with all that is cached; so again when
    asked again."""


class UnsubscribeCache(msgspec.Struct, frozen=True, tag="unfollow_cache"):
    """Enough of `PrefixCacheUpdate`s; one may be on its way."""


class SubscribeSteps(msgspec.Struct, frozen=True, tag="subscribe_steps"):
    """Asks for `StepStatistics` of the steps from now on, until `UnsubscribeSteps`."""


class UnsubscribeSteps(msgspec.Struct, frozen=True, tag="unsubscribe_steps"):
    """Enough of `StepStatistics`."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the workers, then the engine."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position, of the model's own distribution (before penalties and temperature)."""

    logprob: Logprob
    rank: Count
    """Rank of the sampled token; 1 is the most likely."""
    top_token_ids: Sequence[TokenId]
    """The most likely tokens, best first; as many as were asked for."""
    top_logprobs: Sequence[Logprob]

    def fits(self, vocab_size: int, num_top: int) -> bool:
        """True if these can be of a vocabulary of that size, and of no more likeliest tokens."""
        top_ids = self.top_token_ids
        return len(top_ids) == len(self.top_logprobs) <= num_top and (
            not top_ids or max(top_ids) < vocab_size
        )


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive prompt tokens, as columns: no process on their way looks at single ones."""

    first: Size
    """Position of the first of the tokens, at least 1."""
    num_top: Place
    """Likeliest tokens at each position."""
    ranks: bytes
    """[tokens] int32, as in `TokenLogprobs`. All numbers are little-endian."""
    top_token_ids: bytes
    """[tokens, num_top] int32."""
    logprobs: bytes
    """[tokens, 1 + num_top] float32: of the prompt's token, then of the likeliest ones."""

    def fits(self, vocab_size: int, num_top: int, num_prompt_tokens: int) -> bool:
        """True if these can be of a prompt and a vocabulary of that size, and of no more likeliest tokens."""
        num_tokens, ids = len(self.ranks) // 4, array("i")
        if self.num_top > num_top or self.end > num_prompt_tokens or len(self.ranks) % 4:
            return False
        if len(self.top_token_ids) != 4 * num_tokens * self.num_top:
            return False
        ids.frombytes(self.top_token_ids)
        in_range = not ids or (min(ids) >= 0 and max(ids) < vocab_size)
        return in_range and len(self.logprobs) == 4 * num_tokens * (1 + self.num_top)

    @property
    def end(self) -> int:
        """The position behind the last of the tokens."""
        return self.first + len(self.ranks) // 4

    def since(self, position: int) -> PromptLogprobs:
        """Log-probabilities from `position` on."""
        skipped = position - self.first
        if skipped <= 0:
            return self
        return PromptLogprobs(
            position,
            self.num_top,
            self.ranks[4 * skipped :],
            self.top_token_ids[4 * skipped * self.num_top :],
            self.logprobs[4 * skipped * (1 + self.num_top) :],
        )

    def entries(self) -> list[TokenLogprobs]:
        """One entry for each token. They may be a million: the collector of garbage need not look at them."""
        ranks, top_ids, logprobs = array("i"), array("i"), array("f")
        ranks.frombytes(self.ranks)
        top_ids.frombytes(self.top_token_ids)
        logprobs.frombytes(self.logprobs)
        k = self.num_top
        return [
            TokenLogprobs(
                logprobs[i * (1 + k)],
                rank,
                tuple(top_ids[i * k : (i + 1) * k]),
                tuple(logprobs[i * (1 + k) + 1 : (i + 1) * (1 + k)]),
            )
            for i, rank in enumerate(ranks)
        ]


class TokenChunk(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request, or news of its prompt."""

    request_id: str
    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ITEMS)]
    finish_reason: FinishReason | None = None
    stop_reason: TokenId | Sentence | None = None
    """The stop token id or stop string that ended the answer; None for the model's own end-of-sequence."""
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: Count = 0
    """Prompt tokens whose KV came from the cache at first admission."""
    error: Sentence | None = None
    """One sentence, with `FinishReason.ERROR`."""
    num_computed_tokens: Count | None = None
    """Computed tokens of the prompt, in a chunk that tells of the prompt alone; load tracking uses it."""
    kv_source: KVSource | None = None
    """Future place of KV that is held, once the request is queued; again in the last chunk if the KV is there."""
    queue_time_s: Seconds | None = None
    """Seconds before the first step, in an engine's first chunk. A dispatcher adds the time in which no engine had
    the request, and repeats it when another engine begins before the first token."""
    received_ns: Annotated[int, Meta(ge=0)] = 0
    """Nanoseconds on the clock of the process that received the chunk."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of further prompt tokens, behind those of the chunks before."""
    embedding: bytes | None = None
    """[hidden] float32, little-endian, in the last chunk of a request with `pooling`."""
    blamed_field: Name = ""
    """Field of the request whose fault the error is: `grammar`, or one of `SamplingParams`; empty if none."""
    timed_out: bool = False
    """True if the error is that the request's deadline has passed."""
    num_drafted: Count = 0
    """Drafts of the step that gave the tokens (speculative decoding)."""
    num_accepted: Count = 0
    """Leading drafts of these that were right."""

    @property
    def is_news(self) -> bool:
        """True if the chunk tells of the prompt alone; such chunks do not go to clients."""
        return not self.token_ids and self.finish_reason is None


class TokenChunks(msgspec.Struct, frozen=True, tag="chunks"):
    """All chunks that one step made for one frontend."""

    chunks: Annotated[list[TokenChunk], Meta(max_length=MAX_ITEMS)]


class PrefixCacheUpdate(msgspec.Struct, frozen=True, tag="prefix_cache_update"):
    """Changes of the cached blocks since the last update, as the first 8 bytes of each key; no key is in both."""

    stored: Annotated[bytes, Meta(max_length=8 * MAX_ITEMS)]
    removed: Annotated[bytes, Meta(max_length=8 * MAX_ITEMS)]
    starts_anew: bool = False
    """True if earlier updates no longer count."""


class StepBin(msgspec.Struct, frozen=True, array_like=True):
    """A step, or several that ended close together."""

    age_s: Seconds
    """Seconds between the end of the last step and the message."""
    step: Count
    num_steps: Count
    step_time_s: Seconds
    """Seconds of the longest step."""
    num_prefill_tokens: Count
    """Tokens of all steps that requests were given several at a time."""
    num_decode_tokens: Count
    """Tokens of all steps that requests were given one by one."""
    num_seqs: Count

    def joined(self, later: StepBin) -> StepBin:
        """The steps of both in one bin."""
        return StepBin(
            later.age_s,
            later.step,
            self.num_steps + later.num_steps,
            max(self.step_time_s, later.step_time_s),
            self.num_prefill_tokens + later.num_prefill_tokens,
            self.num_decode_tokens + later.num_decode_tokens,
            max(self.num_seqs, later.num_seqs),
        )


class StepStatistics(msgspec.Struct, frozen=True, tag="step_statistics"):
    """Steps that have ended since the last such message, oldest first; a bounded number."""

    bins: Annotated[list[StepBin], Meta(max_length=MAX_ITEMS)]
    replica: Name = ""
    """Name of the replica, set by the dispatcher in front of it."""


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine's first message: the limits that requests are checked against at the door."""

    max_model_len: Size
    vocab_size: Size
    num_blocks: Annotated[int, Meta(ge=1, le=MAX_COUNT)]
    block_size: Size
    max_num_seqs: Annotated[int, Meta(ge=1, le=MAX_COUNT)]
    max_num_waiting: Count
    max_num_waiting_tokens: Count
    """Prompt tokens that requests may have which wait and have not begun."""
    summary: Sentence
    """One line for the operator: device, dtype, KV cache size."""
    hidden_size: Count = 0
    """Numbers of an embedding that may be given in place of a token; 0 if none can be."""
    feature_bytes: Count = 0
    """Bytes of the features of the audio that each request must have; 0 of a model that is given text alone."""
    encodes_text: bool = False
    """Requests bring a text for the model's encoder."""
    protocol_version: int = PROTOCOL_VERSION
    role: Role = Role.NONE
    roles: Annotated[tuple[Role, ...], Meta(max_length=len(Role))] = ()
    """Roles that it may be given while it runs."""
    host_id: Name = ""
    """Id of a host, new at each start; empty for an engine."""
    max_logprobs: Annotated[int, Meta(ge=ALL_LOGPROBS, le=2**31 - 1)] = DEFAULT_MAX_LOGPROBS
    """Likeliest tokens that a request may ask for at each position; -1 allows the whole vocabulary."""
    routers: Annotated[tuple[Name, ...], Meta(max_length=MAX_ROUTERS)] = ()
    """Ids of all routers that a request may pass behind this point."""
    kv_group: KVGroup | None = None
    """The KV group whose blocks `PrefixCacheUpdate`s tell; None if it keeps all."""

    def __post_init__(self) -> None:
        if self.kv_group is not None and self.kv_group.block_size % self.block_size:
            raise ValueError("blocks of `kv_group` are a multiple of `block_size`")


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start, or has given up; it ends after this message."""

    error: Sentence
    is_user_error: bool
    """True if `error` is one sentence meant for the user rather than a bug."""


class RequestRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The request was not taken: the waiting queue is full, or the request can never run."""

    request_id: str
    retry_after_s: Annotated[int, Meta(ge=0, le=86400)] = 0
    """Seconds in which the engine drains the tokens that wait now."""
    error: Sentence = ""
    """Fault of a request that can never run, in one sentence; empty if the queue is full."""


class HostLeave(msgspec.Struct, frozen=True, tag="leave"):
    """A host takes no new requests from this router; it finishes those that it has. Engines do not say this."""


FrontendMessage = (
    Hello
    | GenerateRequest
    | AbortRequests
    | LoadQuery
    | SubscribeCache
    | UnsubscribeCache
    | SubscribeSteps
    | UnsubscribeSteps
    | Shutdown
    | StartTrace
    | StopTrace
    | LoadAdapter
    | UnloadAdapter
)
EngineMessage = (
    EngineReady
    | EngineFailed
    | RequestRefused
    | TokenChunks
    | LoadReport
    | PrefixCacheUpdate
    | StepStatistics
    | TraceStopped
    | AdapterLoaded
)
