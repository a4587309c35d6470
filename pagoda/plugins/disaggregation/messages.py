# SPDX-License-Identifier: Apache-2.0
"""Messages between an engine that fetches KV (decode) and one that exports it (prefill).

    decode  ── KVHello ──> prefill      once per connection
            <─ KVWelcome / KVRefused ─
            ── KVSubscribe ──>               once per transfer
            <─ KVBlocks ... KVPrefilled ─   as the prompt is computed
            ── KVRenew ──>              again and again while anything is wanted
            ── KVCheck ──>              when everything was read
            <─ KVCheckResult ─
            ── KVRelease ──>               whatever became of it
            <─ KVDropped ─                 at any time: there is nothing (more) to come
            <─ KVRenewed ─              answers KVRenew, so silence means that nobody is there

Written as msgpack over ZeroMQ, always encrypted and authenticated (CurveZMQ, keys of the cluster's secret).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pagoda.messages.frontend import TokenLogprobs
from pagoda.messages.ranges import MAX_ITEMS, Name, Place, Sentence
from pagoda.messages.sampling_params import TokenId
from pagoda.messages.transfers import KVPeer
from pagoda.messages.worker import WorkerReady

PROTOCOL_VERSION = 5
"""Version of this wire, raised whenever a message changes in a way that an older process would misread."""


class KVHello(msgspec.Struct, frozen=True, kw_only=True, tag="kv_hello"):
    digest: Sentence
    """`digest_of` the decode side. Must be that of the prefill side; else nothing is to be had."""
    protocol_version: int = PROTOCOL_VERSION


class KVSubscribe(msgspec.Struct, frozen=True, tag="kv_subscribe"):
    """Asks for news of blocks `start` to `end` of a prompt, in the fewest tokens that blocks of any KV group have.
    Renews the lease."""

    transfer_id: Name
    start: Place
    end: Place


class KVRenew(msgspec.Struct, frozen=True, tag="kv_renew"):
    """Renews the leases of these transfers."""

    transfer_ids: list[str]


class KVCheck(msgspec.Struct, frozen=True, tag="kv_check"):
    """Asks if the transfer has been held without a break. Renews the lease."""

    transfer_id: Name


class KVRelease(msgspec.Struct, frozen=True, tag="kv_release"):
    """Ends leases. Unknown and ended ones change nothing."""

    transfer_ids: list[str]


class KVWelcome(msgspec.Struct, frozen=True, kw_only=True, tag="kv_welcome"):
    """Answers `KVHello`. Another peer id means that the workers were started again."""

    engine_id: Name
    peer: KVPeer
    lease_s: Annotated[float, msgspec.Meta(ge=0.1, le=86400.0)]


class KVRefused(msgspec.Struct, frozen=True, tag="kv_refused"):
    """Refuses all fetches; `reason` is a sentence."""

    reason: Sentence


class KVBlocks(msgspec.Struct, frozen=True, tag="kv_blocks"):
    """Blocks `first` to `end` of the prompt are computed, full and never written again while held."""

    transfer_id: Name
    peer_id: Name
    first: Place
    end: Place
    block_ids: Annotated[list[list[Place]], msgspec.Meta(max_length=MAX_ITEMS)]
    """Ids by KV group: of what the prompt's end needs, blocks that these have completed (`KVLayout.part`)."""
    key: Annotated[bytes, msgspec.Meta(max_length=1024)]
    """Key of the last of these blocks (`pagoda.kv.block_keys`): the receiver checks that the tokens are the
    same."""
    num_blocks: Place
    """Number of blocks of the prefix that is handed over, on which depends what its end needs."""


class KVPrefilled(msgspec.Struct, frozen=True, tag="kv_prefilled"):
    """The prompt is computed: no block follows, and `token_id` is the token behind the prompt."""

    transfer_id: Name
    key: Annotated[bytes, msgspec.Meta(max_length=1024)]
    """Key of all tokens before the first token (`KVManager.sequence_key`)."""
    num_blocks: Place
    token_id: TokenId
    conditions: Annotated[bytes, msgspec.Meta(max_length=1024)]
    """`token_conditions` of the request that sampled the token: the receiver takes a token under its own alone."""
    logprobs: TokenLogprobs | None = None
    num_cached_tokens: Place = 0
    """Same as in `TokenChunk`: fetched blocks do not count as cached."""


class KVCheckResult(msgspec.Struct, frozen=True, tag="kv_check_result"):
    transfer_id: Name
    is_valid: bool


class KVDropped(msgspec.Struct, frozen=True, tag="kv_dropped"):
    """Nothing (more) can be fetched of a transfer; `reason` is a clause."""

    transfer_id: Name
    reason: Sentence


class KVRenewed(msgspec.Struct, frozen=True, tag="kv_renewed"):
    """Answers `KVRenew`. Transfers that are no longer held are named by `KVDropped`."""


def digest_of(ready: WorkerReady) -> str:
    """Returns a digest that is equal where KV has the same bytes: fetched blocks are cached like computed ones."""
    return f"{ready.kv_digest} {ready.arithmetic}"


DecodeMessage = KVHello | KVSubscribe | KVRenew | KVCheck | KVRelease
FetchMessage = KVBlocks | KVPrefilled | KVCheckResult | KVDropped
"""Messages of the prefill side about one transfer."""
PrefillMessage = KVWelcome | KVRefused | KVRenewed | FetchMessage
