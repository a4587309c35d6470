# SPDX-License-Identifier: Apache-2.0
"""The wire between an engine and its workers: step plans go one way, step results come back."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pagoda.messages.adapters import AdapterLoaded, LoadAdapter, UnloadAdapter
from pagoda.messages.frontend import PromptLogprobs, TokenLogprobs, Work
from pagoda.messages.kv_groups import KVGroup
from pagoda.messages.ranges import MAX_ITEMS, Count, Name, Place, Seconds, Sentence, Size
from pagoda.messages.sampling_params import TokenId
from pagoda.messages.segments import ColdSegment
from pagoda.messages.tracing import ClockPing, ClockPong, StartTrace, StopTrace, TraceStopped
from pagoda.messages.transfers import KVRank, TierPlace

PROTOCOL_VERSION = 21
"""Version of this wire and of `pagoda.messages.transfers`, raised when an older process would misread a message.
A Ray worker may have another installation than its engine."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and abilities of a backend; the scheduler obeys these and knows no device by name."""

    block_sizes: tuple[Size, ...]
    """KV block sizes in tokens; the first is preferred."""
    max_batch_tokens: Size
    max_batch_seqs: Size
    max_model_len: Size
    batch_multiple: Size = 1
    """Chunks that do not end a sequence's known tokens are cut to a multiple of this."""
    mixed_steps: bool = True
    whole_models: bool = False
    """Programs are whole decoders: a graph is one or is refused. They give logits of a sequence's tokens and keep
    hidden states, so that there are no embeddings."""
    window_multiple: Size = 1
    """Attention reads from a multiple of this on, somewhat before the window of a layer begins."""
    varies_with_batch: bool = False
    """True if it has quicker products, by which a row's bits depend on other rows, for graphs that allow it."""
    weight_formats: tuple[str, ...] = ("float32",)
    """Formats of weights. A backend with `fp8` keeps 8-bit floats of checkpoints; for others they become dense."""
    kv_cache_dtypes: tuple[str, ...] = ("float32",)
    """Number formats of K and V; `fp8` is E4M3."""
    streams_segments: bool = False
    """True if attention reads cold segments out of the host's memory (`pagoda.messages.segments`)."""
    embeds_spans: bool = False
    """True if tokens of a step may have embeddings that are given (`EmbeddedSpan`)."""
    encodes_audio: bool = False
    """True if it computes the encoder of a model that hears."""
    context_parallel: bool = False
    """True if it has `context_attention`."""
    lacks_operations: tuple[str, ...] = ()
    """Operations of forward passes that it does not have; models that need one are refused by its name."""
    max_experts: int | None = None
    """Experts of a layer; None takes any number, as with the limits below."""
    max_conv_width: int | None = None
    """Tokens that a convolution of a layer with a state sees."""
    max_delta_key_dim: int | None = None
    """Elements of a key of a gated delta rule."""
    delta_key_multiple: int = 1
    """Elements of a key are a multiple of this."""
    max_scan_state: int | None = None
    """Elements of a state of a selective scan, of each of its columns."""


class GroupOffer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meeting points of a group that its first rank offers."""

    address: Name = ""
    """`host:port` of a meeting point that it serves."""
    shared_memory: Sentence = ""
    """Path of memory that it shares with ranks on the same host."""


class WorkerHello(msgspec.Struct, frozen=True, kw_only=True, tag="worker_hello"):
    """The first message of a worker that is one of several; the engine answers all with `WorkerPeers`."""

    protocol_version: int = PROTOCOL_VERSION
    host: Name
    """The same for processes that can share memory."""
    stage_address: Name = ""
    """Address that receives the output of the stage before; empty on the first stage."""
    offers: dict[Name, GroupOffer] = {}
    """Offers of the groups that this rank is the first of, by name."""


class WorkerPeers(msgspec.Struct, frozen=True, kw_only=True, tag="worker_peers"):
    """All workers of a replica have said hello."""

    hellos: list[WorkerHello]
    """Hellos in the order of `ParallelConfig.places`."""


class WorkerRoom(msgspec.Struct, frozen=True, tag="worker_room"):
    """A worker that is one of several has loaded its weights; the engine answers all with `KVSize`."""

    num_blocks: Place
    """KV blocks for which this worker has room."""


class KVSize(msgspec.Struct, frozen=True, tag="kv_size"):
    """All workers of a replica have loaded their weights."""

    num_blocks: int
    """The size of every rank's KV cache."""


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag="worker_ready"):
    """Weights are loaded and the KV cache is allocated. The first message of a single worker."""

    protocol_version: int = PROTOCOL_VERSION
    capabilities: Capabilities
    num_blocks: Size
    """Blocks in the pool that all KV groups share."""
    block_size: Size
    """Tokens of a block, in the group where they are fewest."""
    max_model_len: Size
    vocab_size: Size
    summary: Sentence
    """Line for the operator: `cpu (avx512), 2 threads, float32, 4.2 GiB weights`."""
    hidden_size: Count = 0
    """Numbers of an embedding that may be given in place of a token; 0 if none can be."""
    feature_bytes: Count = 0
    """Bytes of the features of the audio that each request must have; 0 of a model that is given text alone."""
    gives_logits: bool = True
    """False of a model for vectors or scores alone, which nothing can be sampled from."""
    arithmetic: Sentence = ""
    """Name such as `cpu (avx512)`; equal for workers whose results agree in every bit."""
    kv_groups: Annotated[tuple[KVGroup, ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()
    """Groups of layers, by whose numbers other messages name them; empty for one that keeps all."""
    kv_host_slots: Place = 0
    """Blocks in the arena in host memory: the smallest of all workers. Of several pools of ranks, those of all."""
    kv_places: tuple[TierPlace, ...] = ()
    """Places of plugins' tiers, by rank."""
    kv_ranks: tuple[KVRank, ...] = ()
    planned_memory_bytes: Count = 0
    """Memory that the worker reckoned to take, before it took any; of several workers, all together."""
    taken_memory_bytes: Count = 0
    """Memory that weights took, and that the largest step and all that is allocated will have taken."""
    max_proposals: Place = 0
    """The most tokens of a slot that the worker's drafter proposes in a step; 0 of a worker without one."""
    segment_tokens: Count = 0
    """Tokens of a segment, of which cold ones may be streamed; 0 of a worker that cannot stream."""
    kv_digest: Sentence = ""
    """Digest of the meaning of KV, with handoff: engines of the same digest may share KV."""

    def places_of(self, tier: str) -> tuple[TierPlace, ...]:
        """Places of one tier, by rank."""
        return tuple(place for place in self.kv_places if place.tier == tier)

    def __post_init__(self) -> None:
        if any(group.block_size % self.block_size for group in self.kv_groups):
            raise ValueError("blocks of `kv_groups` are multiples of `block_size`")


class WorkerFailed(msgspec.Struct, frozen=True, tag="worker_failed"):
    """The worker cannot start; it ends after this message."""

    error: Sentence
    is_user_error: bool


MIN_SAMPLED_ROWS = 64


def most_sampled(max_num_seqs: int) -> int:
    """The most rows that a step samples from."""
    return max(max_num_seqs, MIN_SAMPLED_ROWS)


class SlotStart(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A request new to the worker, in full. It keeps its slot until a later plan lists it in `freed_slots`."""

    slot: int
    token_ids: list[int]
    """Prompt, then output so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Leading tokens whose K and V are in the cache."""
    block_ids: list[list[int]]
    """Block table of each KV group; blocks that no token to come will read have any valid id."""
    work: Work
    """`GenerateRequest.work` as it came; the adapter is loaded."""
    request_id: str = ""
    num_scored_tokens: int = 0
    """Leading prompt tokens whose log-probabilities are not wanted, or not any more."""
    cold: list[ColdSegment] = []
    """Leading segments that lie outside of the cache, in ascending order for each KV group."""
    rank: int = 0
    """The tensor-parallel rank that attends to the request, where each has its own. Its blocks are numbered from
    `rank` times the blocks of a rank on; slots of a plan are in the order of their ranks."""


class NewBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that are appended to a block table."""

    slot: int
    group: int
    """Number of the KV group."""
    block_ids: list[int]


class StepPlan(msgspec.Struct, frozen=True, omit_defaults=True, tag="plan"):
    """One step of one batch. Carries only what changed, so its size does not grow with context length.

    The worker applies, in this order, `freed_slots`, `starts`, `new_blocks`, `cold`; then it computes
    `num_tokens[i]` further tokens of `slots[i]`. A slot samples when its computed tokens have reached all
    its tokens, and the worker appends the sampled token to the slot by itself: a following plan may
    already count on it before the engine has seen it. A slot whose `max_tokens` is 0 ends there instead.

    A slot without a mask may sample several tokens, all of which the worker appends. Plans under way, which count
    on one, then compute tokens that are known, and sample once these are computed.

    A step has rows, one for each token that it computes. A slot samples behind its last row, or, with *k*
    `drafts`, behind each of its last 1 + *k* rows, as if the drafts up to there had been said. Of what it samples
    it keeps the first token, and every next one as long as the one before is the draft. The slot is in no other
    plan until the engine knows how many these are.
    """

    step: int
    slots: list[int]
    num_tokens: list[int]
    """Parallel to `slots`; each at least 1."""
    starts: list[SlotStart] = []
    new_blocks: list[NewBlocks] = []
    freed_slots: list[int] = []
    new_tokens: list[tuple[int, int]] = []
    """(slot, token id) sampled by the last of several stages, for the others."""
    forced_tokens: list[tuple[int, list[int]]] = []
    """(slot, token ids) that a grammar has appended to what was sampled, for all stages; applied behind
    `new_tokens`."""
    drafts: list[tuple[int, list[int]]] = []
    """(slot, token ids) that may follow all tokens of a slot; the last of its `num_tokens`."""
    proposals: list[tuple[int, int]] = []
    """(slot, number): how many tokens the worker's drafter is asked to propose behind those that the slot samples;
    only where `WorkerReady.max_proposals` allows as many."""
    masked_slots: list[int] = []
    """Slots that sample with a grammar: before that, the worker awaits the step's `TokenMasks`."""
    cold: list[ColdSegment] = []
    """Segments that lie outside of the cache from this step on: each is the next one of its slot and KV group."""


class TokenMasks(msgspec.Struct, frozen=True, omit_defaults=True, tag="masks"):
    """Tokens that slots may sample in a step. Sent once, to the rank that samples, for a plan with `masked_slots`.

    What a slot samples that is in neither is not wanted any more.
    """

    step: int
    masks: dict[int, bytes] = {}
    """Masks by slot, as `SamplingRules.allowed` in little-endian bytes. They say all that `min_tokens` does."""
    tokens: dict[int, int] = {}
    """Tokens by slot that are certain and need no sampling."""
    draft_masks: dict[int, list[bytes]] = {}
    """Masks by slot for the tokens behind each of its drafts. Behind drafts that lack one nothing is sampled."""


class LostSegments(msgspec.Struct, frozen=True, omit_defaults=True):
    """Cold segments of a slot that a step could not read."""

    reason: Sentence
    first: Count
    """The first of them, by its place in the slot; those in front of it were read."""
    hangs: bool = False
    """True if the tier did not answer: what lies there may be good."""

    def joined(self, other: LostSegments) -> LostSegments:
        """The loss that tells of both, as ranks have each a part of a segment."""
        return min(self, other, key=lambda lost: (lost.first, lost.hangs))


class StepResult(msgspec.Struct, frozen=True, omit_defaults=True, tag="result"):
    """Result of a step. All lists but `slots` and `token_ids` are sparse."""

    step: int
    slots: list[int]
    """Slots that sampled, in the order of the plan."""
    token_ids: list[Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]]
    """Tokens of each of `slots`, at least one; they follow one another."""
    logprobs: dict[int, list[TokenLogprobs]] = {}
    """Parallel to the slot's `token_ids`, of slots that report them."""
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    embeddings: dict[int, bytes] = {}
    """Pooled prompts [hidden] float32, little-endian, of slots whose prompt is computed."""
    errors: dict[int, Sentence] = {}
    """Errors of single requests by slot; `slots` lacks these."""
    lost_segments: dict[int, LostSegments] = {}
    """Slots of which a cold segment could not be read; `slots` lacks these. K and V of the tokens that this step
    and later ones compute of them mean nothing."""
    streamed_bytes: Count = 0
    """Bytes of cold segments that attention read, on this rank."""
    stream_time_s: Seconds = 0.0
    """Seconds of `forward_time_s` that attention over cold segments took, with waits for them."""
    blamed_fields: dict[int, Name] = {}
    """Sampling parameters that `errors` of slots are the fault of, where it is one's."""
    proposals: dict[int, list[TokenId]] = {}
    """Tokens that may follow `token_ids` of slots, at most as many as the plan asks for. They promise nothing."""
    propose_time_s: Seconds = 0.0
    """Seconds that these took, beside `step_time_s`."""
    step_time_s: Seconds = 0.0
    """Seconds of computing; the times of several stages are added up."""
    prepare_time_s: Seconds = 0.0
    """Seconds of `step_time_s` until the input of the forward pass was ready."""
    forward_time_s: Seconds = 0.0
    sample_time_s: Seconds = 0.0
    """Seconds from hidden states to tokens."""
    idle_time_s: Seconds = 0.0
    """Seconds since the last step for which the sampling worker had no plan, or awaited the stage before."""
    expert_tokens: Annotated[list[Count], msgspec.Meta(max_length=MAX_ITEMS)] = []
    """Tokens given to each expert, in all layers together; empty without experts."""


WorkerOrder = (
    StepPlan | TokenMasks | StartTrace | StopTrace | ClockPong | LoadAdapter | UnloadAdapter
)
"""Messages from an engine to a worker that knows its peers."""


class WorkerProgress(msgspec.Struct, frozen=True, tag="progress"):
    """The worker, which is starting, has loaded more weights. Sent once a second at most."""


WorkerMessage = (
    WorkerHello
    | WorkerProgress
    | WorkerRoom
    | WorkerReady
    | WorkerFailed
    | StepResult
    | AdapterLoaded
    | ClockPing
    | TraceStopped
)
