"""What an engine that fetches KV (decode) and one that holds it (prefill) say to each other.

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

import msgspec

from pagoda.messages.frontend import TokenLogprobs
from pagoda.messages.sampling_params import TokenId
from pagoda.messages.transfers import KVPeer
from pagoda.messages.worker import WorkerReady

PROTOCOL_VERSION = 1
"""Version of this wire, raised whenever a message changes in a way that an older process would misread."""


class KVHello(msgspec.Struct, frozen=True, kw_only=True, tag="kv_hello"):
    digest: str
    """`digest_of` the decode side. Must be that of the prefill side; else nothing is to be had."""
    protocol_version: int = PROTOCOL_VERSION


class KVSubscribe(msgspec.Struct, frozen=True, tag="kv_subscribe"):
    """Tell me of this transfer's blocks from index `start` on, up to `end`. Renews the lease."""

    transfer_id: str
    start: int
    end: int


class KVRenew(msgspec.Struct, frozen=True, tag="kv_renew"):
    """These are still wanted: hold them for one more lease."""

    transfer_ids: list[str]


class KVCheck(msgspec.Struct, frozen=True, tag="kv_check"):
    """Was this held without a break until now?"""

    transfer_id: str


class KVRelease(msgspec.Struct, frozen=True, tag="kv_release"):
    """These need not be held any more. Unknown ones, and those that were done before, change nothing."""

    transfer_ids: list[str]


class KVWelcome(msgspec.Struct, frozen=True, kw_only=True, tag="kv_welcome"):
    """Comes again, with another peer, when the workers were started again."""

    engine_id: str
    peer: KVPeer
    lease_s: float


class KVRefused(msgspec.Struct, frozen=True, tag="kv_refused"):
    """Nothing can be fetched here; a sentence says why."""

    reason: str


class KVBlocks(msgspec.Struct, frozen=True, tag="kv_blocks"):
    """Blocks of the prompt, from index `first` on, are computed, full and never written again while held."""

    transfer_id: str
    peer_id: str
    first: int
    block_ids: list[int]
    key: bytes
    """Of the last of them (`pagoda.kv.block_keys`), so that nobody reads KV of other tokens than he believes."""
    num_blocks: int
    """How many there will be of the whole prompt, from its beginning."""


class KVPrefilled(msgspec.Struct, frozen=True, tag="kv_prefilled"):
    """No block follows, and this is the token behind the prompt."""

    transfer_id: str
    key: bytes
    """Of all tokens before it (`KVManager.sequence_key`)."""
    num_blocks: int
    """As in `KVBlocks`."""
    token_id: TokenId
    logprobs: TokenLogprobs | None = None
    num_cached_tokens: int = 0
    """As in `TokenChunk`: fetched KV is none that did not have to be computed."""


class KVCheckResult(msgspec.Struct, frozen=True, tag="kv_check_result"):
    transfer_id: str
    is_valid: bool


class KVDropped(msgspec.Struct, frozen=True, tag="kv_dropped"):
    """The transfer is unknown, has expired, or its request failed or was aborted; a clause says which."""

    transfer_id: str
    reason: str


class KVRenewed(msgspec.Struct, frozen=True, tag="kv_renewed"):
    """The engine is there; what it does not hold any more was or is told by `KVDropped`."""


def digest_of(ready: WorkerReady) -> str:
    """The same where KV is the same bytes: what is fetched is found, and kept on disk, like what is computed."""
    return f"{ready.kv_digest} {ready.arithmetic}"


DecodeMessage = KVHello | KVSubscribe | KVRenew | KVCheck | KVRelease
PrefillMessage = (
    KVWelcome | KVRefused | KVBlocks | KVPrefilled | KVCheckResult | KVDropped | KVRenewed
)
