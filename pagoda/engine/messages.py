"""Every type that crosses a process boundary, in the order in which a request meets them.

    GenerateRequest ─> engine ─> StepPlan ─> worker ─> StepResult ─> engine ─> TokenChunk

All of them are `msgspec.Struct`s, written as msgpack (`pagoda.ipc.codec`); nothing is pickled. This module is on
the ground floor: it imports nothing of Pagoda but errors, topology and what a trace is, and both ends of every
wire import it.
"""

from __future__ import annotations

import enum
import math
from typing import Annotated

import msgspec

from pagoda.errors import InvalidRequestError
from pagoda.parallel.config import ParallelConfig, RankPlace
from pagoda.telemetry.tracer import TraceSession

PROTOCOL_VERSION = 6
"""Raised whenever a message changes in a way that an older process would misread."""

MIN_TEMPERATURE = 1e-5
"""Below this only the most likely token has a chance, so the others need not be weighed (as in vLLM)."""
MAX_LOGPROBS = 20
MAX_SEQUENCES_PER_REQUEST = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_TOKEN_LIST = 1024
MAX_ALLOWED_TOKENS = 16384

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


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


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen. Spelled as vLLM users know it.

    The fields `n`, `stop`, `include_stop_str_in_output` and `skip_special_tokens` are served at the edge,
    where token ids become text; the rest by the engine and the worker.

    Raises:
        InvalidRequestError: a value is out of range; the error names the field.
    """

    temperature: float = 1.0
    """Below `MIN_TEMPERATURE` takes the most likely token; from there on, logits are divided by it."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities add up to this (Holtzman et al. 2020)."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 or -1 means all."""
    min_p: float = 0.0
    """Leave out tokens less likely than this times the most likely one (Nguyen et al. 2024)."""
    seed: int | None = None
    """Together with the position it determines every random number. Drawn at the frontend when absent."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that has been generated (OpenAI)."""
    frequency_penalty: float = 0.0
    """Subtracted, times its count, from the logit of every token that has been generated (OpenAI)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al. 2019)."""
    logit_bias: dict[TokenId, float] | None = None
    """Added to the logits of single tokens."""
    allowed_token_ids: tuple[TokenId, ...] | None = None
    """When given, no other token is ever sampled."""
    max_tokens: int | None = 16
    """The most tokens to generate; None means as many as the context holds."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are not sampled before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it unless `include_stop_str_in_output`."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Token ids that end the answer, besides the model's own."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """Return the log-probability of each sampled token and of this many most likely ones."""
    n: int = 1
    """How many answers to the same prompt."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _accept_lists(self)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_range("top_k", self.top_k, -1, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _check_range("n", self.n, 1, MAX_SEQUENCES_PER_REQUEST)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                _refuse(
                    "min_tokens", f"must be at most max_tokens ({self.max_tokens})", self.min_tokens
                )
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            _refuse("stop", f"takes at most {MAX_STOP_STRINGS} strings", len(self.stop))
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                _refuse(
                    "stop", f"takes strings of 1 to {MAX_STOP_STRING_CHARS} characters", len(text)
                )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _refuse("allowed_token_ids", "must name at least one token", "an empty list")
        for name, ids, most in (
            ("stop_token_ids", self.stop_token_ids, MAX_TOKEN_LIST),
            ("logit_bias", self.logit_bias, MAX_TOKEN_LIST),
            ("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS),
        ):
            if ids is not None and len(ids) > most:
                _refuse(name, f"takes at most {most} tokens", len(ids))
        for bias in (self.logit_bias or {}).values():
            _check_range("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequestError when a token id is not below `vocab_size`."""
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids),
            ("stop_token_ids", self.stop_token_ids),
        ):
            if ids and max(ids) >= vocab_size:
                _refuse(name, f"takes token ids below the vocabulary size {vocab_size}", max(ids))

    def check_min_tokens(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Raises InvalidRequestError when `min_tokens` holds back every token that may be sampled."""
        held_back = {*eos_token_ids, *self.stop_token_ids}
        choices = range(vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids
        if self.min_tokens > 0 and all(token_id in held_back for token_id in choices):
            _refuse(
                "min_tokens",
                "must be 0 when every allowed token is a stop or end-of-sequence token",
                self.min_tokens,
            )


def _accept_lists(params: SamplingParams) -> None:
    """In Python, lists do as well as tuples, and a single stop string as well as a list of one."""
    for name in ("stop", "stop_token_ids", "allowed_token_ids"):
        value = getattr(params, name)
        if isinstance(value, str):
            msgspec.structs.force_setattr(params, name, (value,))
        elif isinstance(value, list):
            msgspec.structs.force_setattr(params, name, tuple(value))


def _refuse(name: str, rule: str, value: object) -> None:
    raise InvalidRequestError(f"{name} {rule}, got {value}.", param=name)


def _check_range(
    name: str, value: float, low: float, high: float, *, low_open: bool = False
) -> None:
    if not isinstance(value, int | float):
        _refuse(name, "must be a number", repr(value))
    inside = low < value <= high if low_open else low <= value <= high
    if not inside or not math.isfinite(value):
        bracket = "(" if low_open else "["
        _refuse(name, f"must be in {bracket}{low}, {high}]", value)


class KVSource(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to ask for the KV of a prompt: the engine that computes it, or has computed it and still holds it."""

    address: str
    """`tcp://host:port` of that engine's door (`pagoda.pd.door`)."""
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


class FollowCache(msgspec.Struct, frozen=True, tag="follow_cache"):
    """Asks for `CacheNews`, from what is cached now on. Who asks again is told from the beginning."""


class FollowSteps(msgspec.Struct, frozen=True, tag="follow_steps"):
    """Asks for `StepNews` of the steps from now on, until `UnfollowSteps`."""


class UnfollowSteps(msgspec.Struct, frozen=True, tag="unfollow_steps"):
    """Enough of `StepNews`."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the workers, then the engine."""


class StartTrace(msgspec.Struct, frozen=True, omit_defaults=True, tag="start_trace"):
    """Trace from now on, with all processes that you have started; what they start later traces as well."""

    session: TraceSession
    num_steps: int | None = None
    """An engine stops by itself after so many steps; a worker does not read it."""
    number: int = 0
    """Counts what the receiver was told to trace; `TraceStopped` names it."""


class StopTrace(msgspec.Struct, frozen=True, tag="stop_trace"):
    """Trace no longer. Answered by `TraceStopped`, also by those that do not trace."""


class TraceStopped(msgspec.Struct, frozen=True, omit_defaults=True, tag="trace_stopped"):
    """The fragment is closed, and so are those of all processes that this one has started."""

    problems: list[str] = []
    """Why tracing had ended before somewhere: sentences."""
    number: int = 0
    """`StartTrace.number`; of workers, that of their engine counts."""


class ClockPing(msgspec.Struct, frozen=True, tag="clock_ping"):
    """What does your clock say? To whoever started this process, or sends it requests; answered at once."""

    number: int


class ClockPong(msgspec.Struct, frozen=True, tag="clock_pong"):
    """Answers a `ClockPing`."""

    number: int
    uid: str
    """Whose clock it is (`ProcessHeader.uid`)."""
    now_ns: int


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


STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Steps are counted by their tokens: those with up to so many, and more than one bound less."""
STEP_SEQUENCE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class StepTotals(msgspec.Struct, frozen=True, array_like=True):
    """What steps computed and where their time went, since start."""

    num_tokens: int = 0
    """Computed: of prompts and answers, also those that were computed again."""
    num_sequences: int = 0
    """Each counts once in each step."""
    by_tokens: list[int] = []
    """Steps by how many tokens they had (`STEP_TOKEN_BOUNDS`); the last entry is of those above all bounds. Empty
    before the first step."""
    by_sequences: list[int] = []
    """The same by sequences (`STEP_SEQUENCE_BOUNDS`)."""
    schedule_s: float = 0.0
    """Seconds in which the engine made plans."""
    submit_s: float = 0.0
    """Seconds in which it handed them over."""
    wait_s: float = 0.0
    """Seconds from when plans were handed over until their results were there, without those of computing: steps
    wait for the one before, and messages are on their way."""
    prepare_s: float = 0.0
    """Seconds in which workers made inputs of plans."""
    forward_s: float = 0.0
    """Seconds in which they ran the model."""
    sample_s: float = 0.0
    """Seconds in which they chose tokens."""
    update_s: float = 0.0
    """Seconds in which the engine took results."""


class ProcessMemory(msgspec.Struct, frozen=True, array_like=True):
    """What one process takes of its host's memory."""

    role: str
    """Such as `engine dp0` or `worker dp0 tp1 pp0`."""
    pid: int
    resident_bytes: int
    """What several processes share counts in each."""


class LoadReport(msgspec.Struct, frozen=True, kw_only=True, tag="load_report"):
    """What a dispatcher and `/health` need to know about an engine."""

    num_running: int
    num_waiting: int
    num_pending_tokens: int
    """Prompt and output tokens not yet computed."""
    num_free_blocks: int
    """Free or evictable, on the device."""
    num_cached_blocks: int
    """Of these, how many hold what a later request may find."""
    num_blocks: int
    num_steps: int
    """Finished since start."""
    num_preemptions: int
    num_worker_restarts: int
    num_blocks_stored: int
    """KV blocks that later requests could find, since start."""
    num_blocks_removed: int
    """Of these, evicted or lost with a worker."""
    num_prefix_hit_tokens: int
    num_prompt_tokens: int
    """Prompt tokens admitted; hits over this is the hit rate."""
    step_time_s: float
    """Moving average."""
    stalled_for_s: float
    """Seconds since a step last finished while work was waiting; 0 when idle."""
    expert_tokens: list[int] = []
    """Tokens given to each expert since start; see `StepResult`."""
    expert_rank_tokens: list[int] = []
    """The same for each tensor-parallel rank that holds experts of its own; empty without expert parallelism."""
    is_worker_ready: bool = True
    """False while a lost worker is being replaced."""
    num_awaiting_kv: int = 0
    """Requests that wait for KV to be looked up or loaded; `num_waiting` does not count them."""
    tiers: tuple[TierLoad, ...] = ()
    """Below the device, nearest first; other engines, from which KV is fetched, are the last."""
    num_leases: int = 0
    """Requests whose KV is held for other engines."""
    num_wanted_leases: int = 0
    """Of these, those that another engine has asked for and is not done with."""
    num_leased_blocks: int = 0
    """Blocks of them; one of two requests counts twice."""
    num_leases_expired: int = 0
    """Since start: nobody fetched them, or said that they were fetched."""
    num_generated_tokens: int = 0
    """Sampled since start."""
    steps: StepTotals = StepTotals()
    num_engine_restarts: int = 0
    """Engines behind a dispatcher that were lost since it started, and started again if they could be."""
    processes: tuple[ProcessMemory, ...] = ()
    """Of the engine and of its workers on the same host; of what is behind a dispatcher, all."""
    query_id: int | None = None
    """Of the query that this answers; None when the engine reports by itself that `is_worker_ready` changed."""
    replicas: tuple[ReplicaLoad, ...] = ()
    """What a dispatcher adds up here, one by one; empty for an engine."""


class CacheNews(msgspec.Struct, frozen=True, tag="cache_news"):
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


class StepNews(msgspec.Struct, frozen=True, tag="step_news"):
    """Steps that have ended since the last such message, oldest first; a bounded number."""

    bins: list[StepBin]
    replica: str = ""
    """Which one it was, as the dispatcher in front of it calls it; an engine does not know that."""


class TierLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How full one tier is, and what it has done since the start."""

    name: str
    num_blocks: int
    """That can be found in it."""
    num_total_blocks: int
    """That it has room for."""
    num_stored: int = 0
    num_removed: int = 0
    num_loaded: int = 0
    num_failed: int = 0
    """Blocks that should have been loaded or stored, and were not."""
    is_indexed: bool = True
    """False while it is still finding out what it holds."""
    is_shared: bool = False
    """Whether engines beside each other have it together, so that what is in it counts once."""


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, as the dispatcher in front of it sees it."""

    name: str
    """The address of a host, or the number of an engine, from 0."""
    state: str
    """`starting`, `ready`, `degraded` (its worker is being replaced), `ejected` (it does worse than others,
    and gets nothing new for a while) or `failed` (given up)."""
    num_requests: int
    """Requests that were sent there and have not ended."""
    weighed_tokens: int
    """The work that these still are, as policies weigh it."""
    num_losses: int = 0
    """Of its engine, or of engines behind it."""
    report: LoadReport | None = None
    """Its own; None while it does not answer."""


class Role(enum.StrEnum):
    """What an engine does of a request that two engines share."""

    NONE = "none"
    """It shares none: it has no door, and asks at none."""
    PREFILL = "prefill"
    """It computes prompts and holds their KV for others."""
    DECODE = "decode"
    """It fetches KV of prompts and goes on from there; what it cannot fetch it computes."""
    BOTH = "both"

    @property
    def holds_kv(self) -> bool:
        return self in (Role.PREFILL, Role.BOTH)

    @property
    def fetches_kv(self) -> bool:
        return self in (Role.DECODE, Role.BOTH)


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


class HostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A host as it can be found. All else about it is said over the connection to it."""

    host_id: str
    """New at each start; empty where only the address is known."""
    address: str
    """`tcp://host:port`, where it takes `FrontendMessage`s, as an engine does."""


class HostJoin(msgspec.Struct, frozen=True, tag="join"):
    """A host says to a router that it is there: first, and again and again as long as it is."""

    host: HostRecord


class JoinAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="join_answer"):
    """Answers every `HostJoin`."""

    ttl_s: float
    """After how many seconds without another one the host counts as gone."""
    refusal: str = ""
    """Why the host is not used, in a sentence; empty if it is, or may still be."""
    is_final: bool = False
    """The router will not use it until it is another one; it need not come again."""


class HostLeave(msgspec.Struct, frozen=True, tag="leave"):
    """A host takes no new requests from this router; it finishes those that it has."""


FrontendMessage = (
    Hello
    | GenerateRequest
    | AbortRequests
    | LoadQuery
    | FollowCache
    | FollowSteps
    | UnfollowSteps
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
    | CacheNews
    | StepNews
    | TraceStopped
    | ClockPing
)
HostMessage = EngineMessage | HostLeave
"""What a host says to a router."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend can do; the scheduler obeys these and knows no device by name."""

    block_sizes: tuple[int, ...]
    """KV block sizes in tokens; the first is preferred."""
    max_batch_tokens: int
    """The most tokens in one step."""
    max_batch_seqs: int
    """The most sequences in one step."""
    max_model_len: int
    """The longest sequence."""
    batch_multiple: int = 1
    """Chunks that do not end a sequence's known tokens are cut to a multiple of this."""
    mixed_steps: bool = True
    """Whether a step may hold prompt chunks and single decode tokens together."""
    weight_formats: tuple[str, ...] = ("float32",)
    """Formats that weights may have in memory."""
    kv_cache_dtypes: tuple[str, ...] = ("float32",)
    """Formats of K and V in the cache, whatever that of activations."""


class CurveKeys(msgspec.Struct, frozen=True):
    """What a worker on another host needs to talk to its engine and its peers (CurveZMQ); keys are in Z85.

    One pair is of all that bind sockets, one of all that connect to them: the engine and the workers of one start.
    """

    server_key: str
    """Public, of whoever binds a socket."""
    public_key: str
    """Of whoever connects."""
    secret_key: str
    """Belongs to `public_key`."""
    server_secret_key: str
    """Belongs to `server_key`: workers bind sockets for their peers."""


class KVHandoffConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's part in prefill/decode handoff."""

    role: Role
    transports: tuple[str, ...]
    """Those that may be used (`pagoda.pd.transport`), the best first."""
    host: str
    """The address at which workers of other engines reach this host, where `WorkerConfig.bind_host` says none."""
    secret: bytes
    """Shared by all that may reach each other's KV; both sides of a connection prove that they know it."""
    encrypts: bool = False
    """Whether KV is encrypted between hosts. The proof of the secret always is."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker process is told at its start."""

    model: str
    """A model directory or GGUF file, or the name of a shape preset when `load_format` is `dummy`."""
    load_format: str = "auto"
    """`auto` reads safetensors; `dummy` makes random weights."""
    dtype: str = "auto"
    """`auto` takes the checkpoint's; else `float32`, `bfloat16`, `float16`."""
    quantization: str = "none"
    """Of dense weights as they are loaded: `none`, `int8` or `int4`."""
    quantization_group_size: int = 32
    """Inputs that share a scale in `int4`: 32, 64 or 128."""
    kv_cache_dtype: str = "auto"
    """`auto` takes that of activations; else `float32`, `bfloat16`, `float16`, `int8`."""
    seed: int = 0
    """Of dummy weights."""
    backend: str = "auto"
    """`cpu` has native kernels, `reference` is plain PyTorch; `auto` takes `cpu` where it is available."""
    max_model_len: int | None = None
    """None takes the model's own."""
    max_num_seqs: int = 256
    block_size: int | None = None
    """None takes the backend's preferred one."""
    num_blocks: int | None = None
    """None sizes the KV cache from `kv_cache_memory_bytes`, or from free memory."""
    kv_cache_memory_bytes: int | None = None
    memory_utilization: float = 0.5
    """The share of free memory that the KV cache may take when nothing else is said."""
    num_threads: int | None = None
    """None takes the cores that this process may use."""
    pin_threads: bool = False
    """Whether each thread stays on one core."""
    parallel: ParallelConfig = ParallelConfig()
    place: RankPlace = RankPlace()
    """Which of its ranks this worker is."""
    workers_on_host: int = 1
    """Workers that share this host's cores and memory, this one among them."""
    host_memory_bytes: int | None = None
    """What was free on the host before any of them started; None means to look."""
    curve: CurveKeys | None = None
    """Of all sockets, where the engine's is on TCP; None where sockets lie in a private directory."""
    bind_host: str = ""
    """The address at which this worker's host is reached by its peers; empty when all are on one host."""
    kv_host_bytes: int = 0
    """Host memory of this worker that holds blocks for which the device has no room; 0 for none."""
    kv_disk_path: str | None = None
    """Where blocks are kept that outlive the server; None for nowhere."""
    kv_handoff: KVHandoffConfig | None = None
    """How KV goes to workers of other engines, or comes from there; None for not at all."""
    trace: TraceSession | None = None
    """What is being traced when the worker starts."""

    @property
    def has_transfer_link(self) -> bool:
        """Whether the worker opens a second connection, for transfers."""
        return (
            self.kv_host_bytes > 0 or self.kv_disk_path is not None or self.kv_handoff is not None
        )


class WorkerHello(msgspec.Struct, frozen=True, kw_only=True, tag="worker_hello"):
    """The first message of a worker that is one of several; the engine answers all with `WorkerPeers`."""

    host: str
    """The same for processes that can share memory."""
    stage_address: str = ""
    """Where this rank takes what the stage before it computed; empty on the first stage."""
    group_address: str = ""
    """`host:port` where tensor-parallel rank 0 of a stage serves as the meeting point of its group."""
    shared_memory: str = ""
    """Path of the memory that rank 0 of a stage shares with ranks on the same host."""
    num_blocks: int
    """How large a KV cache this worker has room for."""


class WorkerPeers(msgspec.Struct, frozen=True, kw_only=True, tag="worker_peers"):
    """All workers of a replica have said hello."""

    hellos: list[WorkerHello]
    """In the order of `ParallelConfig.places`."""
    num_blocks: int
    """The size of every rank's KV cache."""


class SimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The cost model of the simulated executor: a step takes `base + per_token * tokens` seconds, and a transfer
    `per_transferred_block * blocks`, beside the steps and beside other transfers."""

    base_s: float = 0.0
    per_token_s: float = 0.0
    per_transferred_block_s: float = 0.0
    num_blocks: int = 8192
    block_size: int = 16
    max_model_len: int = 131072
    vocab_size: int = 512
    kv_host_slots: int = 0
    kv_directories: tuple[KVDirectory, ...] = ()


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag="worker_ready"):
    """Weights are loaded and the KV cache is allocated."""

    capabilities: Capabilities
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    summary: str
    """One line for the operator, such as `cpu (avx512), 2 threads, float32, 4.2 GiB weights`."""
    arithmetic: str = ""
    """Such as `cpu (avx512)`; the same for workers whose results agree in every bit."""
    kv_host_slots: int = 0
    """Blocks that the arena in host memory holds; of several workers, the smallest of them."""
    kv_directories: tuple[KVDirectory, ...] = ()
    """Of all ranks that keep blocks on disk, in their order."""
    kv_ranks: tuple[KVRank, ...] = ()
    """Of all ranks, in their order, with handoff: what their KV is and how workers of other engines reach it."""
    kv_digest: str = ""
    """With handoff: the same where KV of one engine means the same to another, however many ranks each has."""


class DeviceBlocks(msgspec.Struct, frozen=True, array_like=True, tag="device"):
    """Blocks of the KV cache that the workers compute from."""

    block_ids: list[int]


class HostSlots(msgspec.Struct, frozen=True, array_like=True, tag="host"):
    """Places in each worker's arena of host memory, one block each."""

    slots: list[int]


class DiskObjects(msgspec.Struct, frozen=True, array_like=True, tag="disk"):
    """Objects in each worker's directory (`pagoda.kv.objects`), one block each."""

    keys: list[bytes]


class KVPart(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of one rank: a block of it is `num_heads` times `head_bytes`, one head after the other."""

    layer: int
    """Of the whole model, whatever stage this is."""
    kind: str
    """`keys`, `values`, `key_scales` or `value_scales`."""
    first_head: int
    """Of the whole model's KV heads."""
    num_heads: int
    head_bytes: int
    """Of one block of one head."""


class KVRank(msgspec.Struct, frozen=True, kw_only=True):
    """The KV memory of one rank, as workers of other engines reach it."""

    parts: tuple[KVPart, ...]
    num_blocks: int
    doors: dict[str, bytes]
    """By transport, what the other side needs to connect; meant for that transport alone."""


class KVPeer(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of another engine, from one of their starts to the next."""

    peer_id: str
    """Engine id and number of the start: never of two sets of workers."""
    ranks: tuple[KVRank, ...]


class RemoteBlocks(msgspec.Struct, frozen=True, array_like=True, tag="remote"):
    """Blocks on the device of another engine. The workers have been told of `peer_id` before."""

    peer_id: str
    block_ids: list[int]


TransferPlace = DeviceBlocks | HostSlots | DiskObjects | RemoteBlocks


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """KV of blocks to be copied from one place to another, beside the steps. Every rank copies its part.

    Ids are never used twice by an engine. The blocks of `source` and `target` correspond one by one.
    """

    transfer_id: int
    generation: int
    """Counts starts of the workers: what workers of an earlier one say does not count."""
    source: TransferPlace
    target: TransferPlace
    after_step: int = -1
    """Steps up to this one may still use device blocks of `target`: a worker waits until it has executed them;
    -1 for none."""


class Transfers(msgspec.Struct, frozen=True, omit_defaults=True, tag="transfers"):
    """Transfers to begin, in order of urgency."""

    transfers: list[Transfer] = []
    met: list[KVPeer] = []
    """Peers that transfers from now on may name."""
    parted: list[str] = []
    """Ids of peers that none names any more; what still runs from there may fail."""


class TransferLink(msgspec.Struct, frozen=True, tag="transfer_link"):
    """The first message on a worker's second connection, which is for transfers alone."""


class TransferEnd(msgspec.Struct, frozen=True, omit_defaults=True, tag="transfer_end"):
    """No rank reads or writes any block of the transfer any more. Each transfer ends once, whatever happens."""

    transfer_id: int
    generation: int
    failed: list[int] = []
    """Indices of the blocks that were not copied, on any rank; what is in their targets means nothing."""
    error: str = ""
    """Why the first of them was not; a clause."""
    unreadable: list[int] = []
    """Those of `failed` whose objects may be good, but could not be read this time, on any rank."""


class KVDirectory(msgspec.Struct, frozen=True):
    """Where one rank keeps its objects."""

    path: str
    object_bytes: int
    """Of each of them, header and padding included."""


class WorkerFailed(msgspec.Struct, frozen=True, tag="worker_failed"):
    """The worker cannot start; it ends after this message."""

    error: str
    is_user_error: bool


class SlotStart(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A request new to the worker, in full. It keeps its slot until a later plan lists it in `freed_slots`."""

    slot: int
    token_ids: list[int]
    """Prompt, then output so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Leading tokens whose K and V are in the cache."""
    block_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    request_id: str = ""
    """For the log."""


class StepPlan(msgspec.Struct, frozen=True, omit_defaults=True, tag="plan"):
    """One step of one batch. Carries only what changed, so its size does not grow with context length.

    The worker applies, in this order, `freed_slots`, `starts`, `new_blocks`; then it computes
    `num_tokens[i]` further tokens of `slots[i]`. A slot samples when its computed tokens have reached all
    its tokens, and the worker appends the sampled token to the slot by itself: a following plan may
    already count on it before the engine has seen it.
    """

    step: int
    slots: list[int]
    num_tokens: list[int]
    """Parallel to `slots`; each at least 1."""
    starts: list[SlotStart] = []
    new_blocks: list[tuple[int, list[int]]] = []
    """(slot, block ids appended to its block table)."""
    freed_slots: list[int] = []
    appended: list[tuple[int, int]] = []
    """(slot, token id) sampled by the last of several stages; the others learn of it here, before computing."""


class StepResult(msgspec.Struct, frozen=True, omit_defaults=True, tag="result"):
    """What a step gave. All lists but `slots` and `token_ids` are sparse."""

    step: int
    slots: list[int]
    """Slots that sampled, in the order of the plan."""
    token_ids: list[int]
    """Parallel to `slots`: the sampled token."""
    logprobs: dict[int, TokenLogprobs] = {}
    """By slot, where the request asked for them."""
    errors: dict[int, str] = {}
    """By slot: what broke for this request alone. Such a slot is not in `slots`."""
    step_time_s: float = 0.0
    """What it took to compute; the times of several stages together."""
    prepare_time_s: float = 0.0
    """Of that, until the input of the forward pass was ready."""
    forward_time_s: float = 0.0
    sample_time_s: float = 0.0
    """From hidden states to tokens."""
    expert_tokens: list[int] = []
    """Tokens given to each expert, in all layers together; empty without experts."""


WorkerOrder = StepPlan | StartTrace | StopTrace | ClockPong
"""What an engine says to a worker that knows its peers."""
WorkerMessage = WorkerHello | WorkerReady | WorkerFailed | StepResult | ClockPing | TraceStopped
TransferMessage = TransferLink | TransferEnd
"""What a worker says on its second connection."""
