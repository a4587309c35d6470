"""The wire between a frontend and an engine: requests go one way, token chunks come back.

Routers and hosts speak the same messages.
"""

from __future__ import annotations

import enum

import msgspec

from pagoda.messages.load import LoadReport
from pagoda.messages.sampling_params import SamplingParams, TokenId
from pagoda.messages.tracing import ClockPing, ClockPong, StartTrace, StopTrace, TraceStopped
from pagoda.messages.worker_config import Role

PROTOCOL_VERSION = 7
"""Version of this wire, raised whenever a message changes in a way that an older process would misread."""


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the model's context, is used up."""
    ABORT = "abort"
    """The client went away, or the server is shutting down."""
    ERROR = "error"
    """This request failed; `TokenChunk.error` says why."""


class KVSource(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to ask for the KV of a prompt: the engine that computes it, or has computed it and still holds it."""

    address: str
    """`tcp://host:port` of that engine's door (`pagoda.pd.links`)."""
    engine_id: str
    """New at each start of that engine; an address may have another one behind it by now."""
    transfer_id: str
    """Under which it holds the KV; chosen by that engine, never given twice."""
    tp_size: int = 1
    """Of that engine, for proxies that ask. Its workers say themselves what each of them has."""
    block_ids: tuple[int, ...] = ()
    """Where the full blocks of the prompt are, once it is computed; for proxies that pass such a list on."""


class GenerateRequest(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate"
):
    """A request as a value: with these fields alone, any replica continues the answer token for token.

    `output_token_ids` is empty for a first arrival and holds the tokens so far for a request that returns
    after an engine was restarted or that moves elsewhere; the receiver goes on behind them.
    `sampling.seed` and `sampling.max_tokens` are resolved (not None), and `eos_token_ids` are the model's
    (empty with `ignore_eos`), so the engine needs no tokenizer and no defaults.
    """

    request_id: str
    prompt_token_ids: list[TokenId]
    sampling: SamplingParams
    output_token_ids: list[TokenId] = []
    eos_token_ids: tuple[TokenId, ...] = ()
    priority: int = 0
    """Lower comes first, as in vLLM."""
    cache_salt: str | None = None
    """Prefix-cache hits happen only among requests of the same salt."""
    returns: bool = False
    """An engine took this request before, so it is not refused for want of room."""
    session: str | None = None
    """Requests of the same session may be served by the same replica; has no effect on the answer."""
    holds_kv: bool = False
    """The answer ends with its next token, and the KV of the prompt is held for another engine, which is told
    where it is by `TokenChunk.kv_source`."""
    kv_source: KVSource | None = None
    """Where KV of the prompt, and the first token, may be fetched from. What does not come is computed."""
    traceparent: str | None = None
    """The span that it is part of, for whoever exports spans (https://www.w3.org/TR/trace-context/)."""
    tracestate: str | None = None
    """What systems of tracing on the way have added to it."""


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Forget these requests; unknown ids are ignored. No chunk follows for them."""

    request_ids: list[str]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A frontend's first message; answered by `EngineReady` as soon as the engine is.

    What else a router says to a host, which refuses a router of another model; an engine does not read it.
    """

    protocol_version: int = PROTOCOL_VERSION
    model: str = ""
    model_digest: str = ""
    """Of all that turns text into tokens, and of what the weights are; the same where answers are alike."""


class LoadQuery(msgspec.Struct, frozen=True, tag="load"):
    """Asks for a `LoadReport`."""

    query_id: int


class SubscribeCache(msgspec.Struct, frozen=True, tag="subscribe_cache"):
    """Asks for `PrefixCacheUpdate`, from what is cached now on. Who asks again is told from the beginning."""


class SubscribeSteps(msgspec.Struct, frozen=True, tag="subscribe_steps"):
    """Asks for `StepStatistics` of the steps from now on, until `UnsubscribeSteps`."""


class UnsubscribeSteps(msgspec.Struct, frozen=True, tag="unfollow_steps"):
    """Enough of `StepStatistics`."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the workers, then the engine."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, of the model's own distribution (before penalties and temperature)."""

    logprob: float
    """Of the sampled token."""
    rank: int
    """Of the sampled token; 1 is the most likely."""
    top_token_ids: list[int]
    """The most likely tokens, best first; as many as were asked for."""
    top_logprobs: list[float]


class TokenChunk(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request, or news of its prompt."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    """Set on the last chunk."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the answer; None for the model's own end-of-sequence."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token id, where asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the cache at first admission."""
    error: str | None = None
    """One sentence, with `FinishReason.ERROR`."""
    num_computed_tokens: int | None = None
    """In a chunk that is news of the prompt alone: how many of its tokens are computed. For weighing the load."""
    kv_source: KVSource | None = None
    """With `GenerateRequest.holds_kv`, in a chunk that comes once the request is queued: where KV will be.
    Again in the last one, if it is there."""
    queue_time_s: float | None = None
    """In an engine's first chunk: how long the request had waited there before its first step. A dispatcher adds
    the time in which no engine had it, and tells it again when another engine begins before the first token."""
    received_ns: int = 0
    """When the process that has it received it, on its own clock; whoever sends it on has another one."""

    @property
    def is_news(self) -> bool:
        """Whether it says something of the prompt alone; such chunks do not go to clients."""
        return not self.token_ids and self.finish_reason is None


class TokenChunks(msgspec.Struct, frozen=True, tag="chunks"):
    """All chunks that one step made for one frontend."""

    chunks: list[TokenChunk]


class PrefixCacheUpdate(msgspec.Struct, frozen=True, tag="cache_news"):
    """Which blocks a request would find, as far as it is different from what was told before.

    Keys are their first 8 bytes each (`pagoda.kv.block_keys`), one after the other. None is in both.
    """

    stored: bytes
    removed: bytes
    starts_anew: bool = False
    """Whether what was told before counts no longer."""


class StepBin(msgspec.Struct, frozen=True, array_like=True):
    """A step, or several that ended close together."""

    age_s: float
    """How long before the message the last of them ended."""
    step: int
    """The number of the last of them."""
    num_steps: int
    step_time_s: float
    """Of the longest of them."""
    num_prefill_tokens: int
    """Of all of them: tokens that requests were given several at a time."""
    num_decode_tokens: int
    """Of all of them: tokens that requests were given one by one."""
    num_seqs: int
    """The most in one of them."""


class StepStatistics(msgspec.Struct, frozen=True, tag="step_news"):
    """Steps that have ended since the last such message, oldest first; a bounded number."""

    bins: list[StepBin]
    replica: str = ""
    """Which one it was, as the dispatcher in front of it calls it; an engine does not know that."""


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine's first message: the limits that requests are checked against at the door."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_waiting: int
    summary: str
    """One line for the operator: device, dtype, KV cache size."""
    protocol_version: int = PROTOCOL_VERSION
    role: Role = Role.NONE
    """In prefill/decode handoff; of several replicas all have the same."""
    host_id: str = ""
    """Of a host, new at each start; empty for an engine."""
    routers: tuple[str, ...] = ()
    """Ids of all routers that a request may pass behind this point."""


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start, or has given up; it ends after this message."""

    error: str
    is_user_error: bool
    """The error is one sentence meant for the user rather than a bug."""


class RequestRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The waiting queue is full; the request was not taken."""

    request_id: str
    retry_after_s: int


FrontendMessage = (
    Hello
    | GenerateRequest
    | AbortRequests
    | LoadQuery
    | SubscribeCache
    | SubscribeSteps
    | UnsubscribeSteps
    | Shutdown
    | StartTrace
    | StopTrace
    | ClockPong
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
    | ClockPing
)
