# SPDX-License-Identifier: Apache-2.0
"""Messages that the decode engine's half sends, and its answers to those that it receives."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from mutated_messages import lies
from operations import assert_linear
from pair import READY

from pagoda.ipc.clock import VirtualClock
from pagoda.ipc.codec import Codec
from pagoda.ipc.curve import keys_of
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import PrefixRequest
from pagoda.kv.layout import KVLayout
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.frontend import KVSource, TokenLogprobs
from pagoda.messages.transfers import (
    DeviceBlocks,
    KVPart,
    KVPeer,
    KVRank,
    RemoteBlocks,
    Transfer,
    TransferEnd,
)
from pagoda.plugins.disaggregation.connector import SILENCE_S, Arrived, Failed, RemoteKV
from pagoda.plugins.disaggregation.links import PeerLost
from pagoda.plugins.disaggregation.messages import (
    DecodeMessage,
    KVBlocks,
    KVCheck,
    KVCheckResult,
    KVDropped,
    KVHello,
    KVPrefilled,
    KVRefused,
    KVRelease,
    KVRenew,
    KVRenewed,
    KVSubscribe,
    KVWelcome,
    PrefillMessage,
)
from pagoda.plugins.disaggregation.transfer_tokens import TransferTokens

KEYS = [bytes([number]) * 32 for number in range(8)]
ADDRESS = "tcp://p:1"
TOKENS = TransferTokens(keys_of(b"the cluster's secret"))
T, U, V = (TOKENS.id_of(ADDRESS, "e", token) for token in "tuv")
"""Transfers."""
HELLO = KVHello(digest="digest arithmetic")


def source(token: str = "t", address: str = ADDRESS, engine_id: str = "e") -> KVSource:
    transfer_id = TOKENS.id_of(address, engine_id, token)
    return KVSource(address=address, engine_id=engine_id, transfer_id=transfer_id)


def prefix(request_id: str = "r", **fields: str) -> PrefixRequest:
    return PrefixRequest(request_id, KEYS, list(range(32)), source(**fields))


def welcome(number: int = 1, engine_id: str = "e", num_blocks: int = 64) -> KVWelcome:
    rank = KVRank(parts=(), num_blocks=num_blocks, descriptors={})
    peer = KVPeer(peer_id=f"{engine_id}-{number}", ranks=(rank,))
    return KVWelcome(engine_id=engine_id, peer=peer, lease_s=30.0)


def blocks(first: int, block_ids: list[int], num_blocks: int = 8, peer_id: str = "e-1") -> KVBlocks:
    end = first + len(block_ids)
    return KVBlocks(T, peer_id, first, end, [block_ids], KEYS[min(end, len(KEYS)) - 1], num_blocks)


def prefilled(token_id: int = 7, num_blocks: int = 8) -> KVPrefilled:
    return KVPrefilled(T, b"key", num_blocks, token_id, b"conditions")


class Rig:
    """The connector, with the other side in the test's hands."""

    def __init__(self, *, fails: bool = False) -> None:
        self.clock = VirtualClock()
        self.pool = BlockPool(64)
        self.ledger = TransferLedger(self.pool)
        self.sent: list[DecodeMessage] = []
        self.inbox: list[tuple[str, PrefillMessage | PeerLost]] = []
        self.hung_up: list[str] = []
        self.remote = RemoteKV(
            self, self.ledger, KVLayout(4), self.clock, tokens=TOKENS, engine_id="own", fails=fails
        )
        self.remote.workers_ready(READY)

    def send(self, address: str, message: DecodeMessage) -> None:
        assert address.startswith("tcp://")
        self.sent.append(message)

    def receive(self) -> list[tuple[str, PrefillMessage | PeerLost]]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def hang_up(self, address: str) -> None:
        self.hung_up.append(address)

    def pollables(self) -> list[object]:
        return []

    def close(self) -> None:
        pass

    def hear(self, *messages: PrefillMessage | PeerLost) -> None:
        self.inbox += [(ADDRESS, message) for message in messages]
        self.remote.step()

    def pass_time(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now() + seconds)
        self.remote.step()

    def drain_sent(self) -> list[DecodeMessage]:
        sent, self.sent = self.sent, []
        return sent

    def load(self, start: int = 0, count: int = 8) -> list[Transfer]:
        self.blocks = self.pool.allocate(count)
        self.held_id = self.remote.load(prefix(), start, self.blocks, 3)
        return self.ledger.drain()

    def end(self, transfer: Transfer, failed: list[int] | None = None) -> None:
        error = "broken" if failed else ""
        assert self.ledger.close(TransferEnd(transfer.transfer_id, 0, failed or [], error))

    def settled(self) -> TransferEnd | None:
        ends = self.ledger.drain_settled()
        assert len(ends) <= 1
        return ends[0] if ends else None


@pytest.fixture
def rig() -> Rig:
    return Rig()


def open_rig(*messages: PrefillMessage, fails: bool = False) -> Rig:
    """One request is announced, and its source has said hello."""
    rig = Rig(fails=fails)
    rig.remote.on_queued(prefix(), 2)
    rig.hear(welcome(), *messages)
    rig.sent.clear()
    return rig


def test_a_whole_fetch(rig: Rig) -> None:
    rig.remote.on_queued(prefix(), 2)
    assert rig.drain_sent() == [HELLO, KVSubscribe(T, 0, 8)]
    assert rig.remote.lookup(prefix(), 2) is None
    rig.hear(welcome())
    assert rig.remote.drain_peer_changes() == ([welcome().peer], [])
    assert rig.remote.lookup(prefix(), 2) is None
    rig.hear(blocks(0, [10, 11, 12]))
    assert rig.remote.poll()
    assert rig.remote.lookup(prefix(), 2) == 6, "those that are known will come, and the others"
    [first] = rig.load(2, 6)
    targets = [block.block_id for block in rig.blocks]
    assert first.source == RemoteBlocks("e-1", [12])
    assert first.target == DeviceBlocks(targets[:1])
    assert first.after_step == 3
    rig.hear(blocks(3, [13, 14, 15, 16, 17]), prefilled())
    [second] = rig.ledger.drain()
    assert second.source == RemoteBlocks("e-1", [13, 14, 15, 16, 17])
    assert second.target == DeviceBlocks(targets[1:])
    [news] = rig.remote.drain_events()
    assert isinstance(news, Arrived)
    assert (news.request_id, news.token.token_id, news.token.key) == ("r", 7, b"key")
    rig.end(second)
    assert rig.drain_sent() == []
    rig.end(first)
    assert rig.drain_sent() == [KVCheck(T)]
    assert rig.settled() is None
    rig.hear(KVCheckResult(T, is_valid=True))
    assert rig.settled() == TransferEnd(rig.held_id, 0)
    assert rig.drain_sent() == [KVRelease([T])]
    rig.remote.on_dequeued("r")
    assert rig.drain_sent() == []
    rig.pool.release(rig.blocks)
    assert rig.pool.num_available == 64
    assert rig.remote.next_event_at() is None


def test_the_lease_is_kept_until_the_token_comes() -> None:
    rig = open_rig(blocks(0, list(range(8))))
    [transfer] = rig.load()
    rig.end(transfer)
    rig.drain_sent()
    rig.hear(KVCheckResult(T, is_valid=True))
    assert rig.settled() == TransferEnd(rig.held_id, 0)
    assert rig.drain_sent() == []
    rig.hear(prefilled())
    assert rig.drain_sent() == [KVRelease([T])]


def test_a_prompt_that_the_other_side_has_in_part_only() -> None:
    rig = open_rig(blocks(0, [1, 2, 3], num_blocks=3))
    assert rig.remote.lookup(prefix(), 2) == 1
    assert rig.remote.lookup(prefix(), 3) == 0
    assert rig.remote.lookup(prefix(), 8) is None, "the token is to come"
    rig.hear(prefilled(num_blocks=3))
    assert rig.remote.lookup(prefix(), 8) == 0


@pytest.mark.parametrize(
    "message",
    [
        blocks(0, [1, 2]),
        blocks(1, [1]),
        blocks(4, [5, 6]),
        blocks(-1, [1, 2, 3, 4]),
        blocks(2, []),
        KVBlocks(T, "e-1", 0, 9, [list(range(9))], KEYS[7], 9),
        KVBlocks("unknown", "e-1", 2, 3, [[7]], KEYS[2], 8),
        KVCheckResult(T, is_valid=True),
        KVCheckResult(T, is_valid=False),
        KVCheckResult("unknown", is_valid=False),
        KVDropped("unknown", "why"),
        KVPrefilled("unknown", b"", 0, 1, b""),
        KVRenewed(),
        welcome(),
    ],
)
def test_what_is_repeated_late_or_unknown_changes_nothing(message: PrefillMessage) -> None:
    rig = open_rig(blocks(0, [1, 2]))
    [transfer] = rig.load()
    rig.remote.drain_peer_changes()
    rig.hear(message)
    assert rig.drain_sent() == rig.ledger.drain() == rig.remote.drain_events() == []
    assert rig.settled() is None
    assert rig.remote.drain_peer_changes() == ([], [])
    rig.hear(blocks(2, [3, 4, 5, 6, 7, 8]))
    [rest] = rig.ledger.drain()
    rig.end(transfer)
    rig.end(rest)
    assert rig.drain_sent() == [KVCheck(T)]


@pytest.mark.parametrize(("token_ids", "num_events"), [((7, 7, 8), 1), ((100,), 0)])
def test_a_token_of_the_vocabulary_arrives_once(
    token_ids: tuple[int, ...], num_events: int
) -> None:
    rig = open_rig(*map(prefilled, token_ids))
    assert len(rig.remote.drain_events()) == num_events


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (KVDropped(T, "its lease has run out"), "its lease has run out"),
        (KVRefused("another model"), "another model"),
        (PeerLost("it hung up"), "it hung up"),
        (welcome(2), "its workers were replaced"),
        (welcome(1, "other"), "another engine is there now"),
        (blocks(2, [1], peer_id="e-2"), "its workers were replaced"),
        (KVBlocks(T, "e-1", 2, 3, [[1]], KEYS[5], 8), "it is of other tokens than the request's"),
        (blocks(2, [64]), "it named blocks that it does not have"),
        (blocks(2, [2**40]), "it named blocks that it does not have"),
        (blocks(2, [-1]), "it named blocks that it does not have"),
    ],
)
def test_whatever_ends_it_ends_the_load_with_nothing(
    message: PrefillMessage | PeerLost, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig(blocks(0, [1, 2]))
    [transfer] = rig.load()
    rig.hear(message)
    assert rig.settled() == TransferEnd(rig.held_id, 0, list(range(8)), reason)
    assert rig.drain_sent() == ([] if isinstance(message, PeerLost) else [KVRelease([T])])
    assert [record.message for record in caplog.records] == [
        f"KV cannot be fetched from {ADDRESS}: {reason}"
    ]
    rig.pool.release(rig.blocks)
    assert rig.pool.num_available == 62, "two are still being written"
    rig.end(transfer)
    assert rig.pool.num_available == 64
    assert rig.drain_sent() == []


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (KVDropped(T, "it is not held, or not any more"), "it is not held, or not any more"),
        (KVRefused("another model"), "another model"),
        (PeerLost("nobody is there"), "nobody is there"),
        (welcome(1, "other"), "another engine is there now"),
    ],
)
def test_what_ends_it_before_anything_is_loaded(
    message: PrefillMessage | PeerLost, reason: str, fails: bool
) -> None:
    rig = Rig(fails=fails)
    rig.remote.on_queued(prefix(), 0)
    rig.drain_sent()
    rig.hear(message)
    assert rig.remote.poll()
    assert rig.remote.lookup(prefix(), 0) == 0
    assert rig.drain_sent() == ([] if isinstance(message, PeerLost) else [KVRelease([T])])
    assert rig.remote.drain_events() == ([Failed("r", reason)] if fails else [])


@pytest.mark.parametrize(
    "changed",
    [
        {"address": "tcp://127.0.0.1:2"},
        {"address": "ipc:///tmp/socket"},
        {"address": "tcp://" + "p" * 10_000 + ":1"},
        {"address": "\ud800"},
        {"engine_id": "another"},
        {"engine_id": "\ud800"},
        {"transfer_id": ""},
        {"transfer_id": "t"},
        {"transfer_id": f"t-{'0' * 32}"},
        {"transfer_id": T.replace("t", "u", 1)},
        {"transfer_id": T + "0"},
        {"transfer_id": "t" * 10**6},
        {"transfer_id": TransferTokens(keys_of(b"another secret")).id_of(ADDRESS, "e", "t")},
    ],
    ids=range(13),
)
def test_a_source_that_somebody_made_up_is_neither_asked_nor_ended(
    changed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig()
    rig.remote.on_dequeued("r")
    rig.drain_sent()
    made_up = msgspec.structs.replace(source(), **changed)
    for request_id in ("a", "b"):
        wanted = PrefixRequest(request_id, KEYS, list(range(32)), made_up)
        rig.remote.on_queued(wanted, 0)
        assert rig.remote.lookup(wanted, 0) == 0
        rig.remote.on_dequeued(request_id)
        rig.remote.release(made_up)
    assert rig.sent == []
    assert [record.message for record in caplog.records] == [
        "KV cannot be fetched from the kv_source of a request: "
        "no engine with the secret of this one has made it"
    ]


def test_nobody_is_called_to_be_told_that_he_is_not_needed(rig: Rig) -> None:
    rig.remote.release(source())
    assert rig.sent == []
    rig.remote.on_queued(prefix(), 2)
    rig.drain_sent()
    rig.remote.release(source("u"))
    assert rig.drain_sent() == [KVRelease([U])]


def test_connections_that_rest_make_room_for_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.plugins.disaggregation.connector.MAX_PREFILL_PEERS", 2)
    for number in (1, 2, 3):
        rig.remote.on_queued(prefix(str(number), address=f"tcp://127.0.0.1:{number}"), 0)
    assert rig.remote.lookup(prefix("2"), 0) is None
    assert rig.remote.lookup(prefix("3"), 0) == 0, "there is no room for a third"
    assert rig.hung_up == []
    rig.remote.on_dequeued("1")
    rig.remote.on_queued(prefix("4", address="tcp://127.0.0.1:4"), 0)
    assert rig.hung_up == ["tcp://127.0.0.1:1"]
    assert rig.remote.lookup(prefix("4"), 0) is None


def test_its_own_kv_is_found_on_the_device(rig: Rig) -> None:
    rig.remote.on_queued(prefix(engine_id="own"), 0)
    assert rig.drain_sent() == []
    assert rig.remote.lookup(prefix(), 0) == 0


def test_a_refusal_holds_as_long_as_the_connection() -> None:
    rig = open_rig(KVRefused("another model"))
    rig.remote.on_queued(prefix("next", token="u"), 0)
    assert rig.drain_sent() == [KVRelease([U])]
    rig.hear(PeerLost("it hung up"))
    rig.remote.on_queued(prefix("later", token="v"), 0)
    assert rig.drain_sent() == [HELLO, KVSubscribe(V, 0, 8)]


def test_what_is_not_answered_is_asked_again_and_leases_are_renewed(rig: Rig) -> None:
    rig.remote.on_queued(prefix(), 0)
    rig.drain_sent()
    rig.pass_time(0.5)
    assert rig.drain_sent() == []
    rig.pass_time(0.6)
    assert rig.drain_sent() == [KVRenew([T]), HELLO, KVSubscribe(T, 0, 8)]
    rig.hear(welcome(), blocks(0, [1, 2]))
    [first] = rig.load()
    rig.pass_time(1.1)
    assert rig.drain_sent() == [KVRenew([T]), KVSubscribe(T, 2, 8)]
    rig.hear(blocks(2, [3, 4, 5, 6, 7, 8]), prefilled())
    [second] = rig.ledger.drain()
    rig.end(first)
    rig.end(second)
    assert rig.drain_sent() == [KVCheck(T)]
    rig.pass_time(1.1)
    assert rig.drain_sent() == [KVRenew([T]), KVCheck(T)]


def test_patience_is_with_who_answers(rig: Rig) -> None:
    rig.remote.on_queued(prefix(), 0)
    for _ in range(20):
        rig.pass_time(1.0)
        rig.hear(KVRenewed())
    assert rig.remote.lookup(prefix(), 0) is None
    rig.drain_sent()
    rig.pass_time(SILENCE_S + 0.1)
    assert rig.hung_up == [ADDRESS]
    assert rig.drain_sent() == [KVRelease([T])]
    assert rig.remote.lookup(prefix(), 0) == 0


def test_a_request_that_comes_after_a_long_rest_finds_patience() -> None:
    rig = open_rig()
    rig.remote.on_dequeued("r")
    rig.pass_time(1000.0)
    rig.remote.on_queued(prefix("next", token="u"), 0)
    rig.pass_time(1.1)
    assert rig.hung_up == []
    assert rig.remote.lookup(prefix("next"), 0) is None


def test_workers_are_told_of_peers_and_again_when_they_are_started_anew() -> None:
    rig = open_rig(blocks(0, [1, 2]))
    rig.remote.drain_peer_changes()
    rig.load()
    rig.ledger.drop_all()
    rig.remote.workers_lost()
    assert rig.remote.lookup(prefix(), 0) == 0
    rig.pool.release(rig.blocks)
    assert rig.pool.num_available == 64
    rig.hear(welcome(2))
    assert rig.remote.drain_peer_changes() == ([], []), "there are no workers"
    rig.remote.workers_ready(READY)
    assert rig.remote.drain_peer_changes() == ([welcome(2).peer], [])
    rig.hear(PeerLost("it hung up"))
    assert rig.remote.drain_peer_changes() == ([], ["e-2"])


@pytest.mark.parametrize("end", [lambda it: it.on_dequeued("r"), RemoteKV.close])
def test_an_abort_and_the_end_of_the_engine_end_the_load_and_the_lease(
    end: Callable[[RemoteKV], None],
) -> None:
    rig = open_rig(blocks(0, [1, 2]))
    [transfer] = rig.load()
    end(rig.remote)
    assert rig.drain_sent() == [KVRelease([T])]
    assert rig.settled() is not None
    rig.end(transfer)
    rig.pool.release(rig.blocks)
    assert rig.pool.num_available == 64
    report = rig.remote.load_report()
    assert (report.num_loaded, report.num_failed) == (0, 0), "neither is a failure"


@pytest.mark.parametrize(
    ("block_bytes", "sizes"), [(2**24, [2, 2, 2, 1]), (2**25, [1] * 7), (2**40, [1] * 7), (1, [7])]
)
def test_much_is_read_in_pieces(rig: Rig, block_bytes: int, sizes: list[int]) -> None:
    """A worker gives up a transfer that takes too long, not the others."""
    part = KVPart(0, "keys", 0, 2, block_bytes // 2 or 1)
    rank = KVRank(parts=(part,), num_blocks=64, descriptors={})
    hello = KVWelcome(engine_id="e", peer=KVPeer(peer_id="e-1", ranks=(rank, rank)), lease_s=30.0)
    rig.remote.on_queued(prefix(), 1)
    rig.hear(hello, blocks(0, list(range(10, 18))), prefilled())
    transfers = rig.load(1, 7)
    assert [len(it.source.block_ids) for it in transfers] == sizes
    read = [block_id for it in transfers for block_id in it.source.block_ids]
    assert read == list(range(11, 18))
    written = [block_id for it in transfers for block_id in it.target.block_ids]
    assert written == [block.block_id for block in rig.blocks]
    rig.drain_sent()
    for _ in range(40):
        rig.pass_time(1.0)
        rig.hear(KVRenewed())
    for transfer in transfers[1:]:
        rig.end(transfer)
    assert KVCheck(T) not in rig.drain_sent()
    rig.end(transfers[0])
    assert rig.drain_sent() == [KVCheck(T)]


def test_only_those_of_whom_there_is_news_are_named(rig: Rig) -> None:
    for token in "tuv":
        rig.remote.on_queued(prefix(token, token=token), 0)
    rig.remote.poll()
    rig.hear(welcome())
    assert rig.remote.poll() == {"t", "u", "v"}
    rig.hear(blocks(0, [1, 2]))
    assert rig.remote.poll() == {"t"}
    rig.hear(KVDropped(U, "why"))
    assert rig.remote.poll() == {"u"}
    rig.hear(KVRenewed())
    assert not rig.remote.poll()


def test_what_goes_wrong_is_said_again_after_a_while(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(300):
        address = f"tcp://127.0.0.1:{number + 1}"
        rig.remote.on_queued(prefix(f"{number}", address=address), 0)
        rig.inbox = [(address, PeerLost("it hung up"))]
        rig.remote.step()
    assert len(caplog.records) == 300, "of each address"
    rig.remote.on_queued(prefix("again"), 0)
    rig.hear(PeerLost("it hung up"))
    rig.remote.on_queued(prefix("and again"), 0)
    rig.hear(PeerLost("it hung up"))
    assert len(caplog.records) == 301
    rig.pass_time(61.0)
    rig.remote.on_queued(prefix("later"), 0)
    rig.hear(PeerLost("it hung up"))
    assert len(caplog.records) == 302
    assert len(rig.remote.complaints) == 1


def fetches(count: int) -> Callable[[], None]:
    """A burst of requests for KV of many engines, of which none answers."""
    remote = Rig().remote
    requests = [
        prefix(str(number), token=str(number), address=f"tcp://p{number % (count // 16)}:1")
        for number in range(count)
    ]

    def live() -> None:
        for request in requests:
            remote.on_queued(request, 0)
            remote.step()
            remote.next_event_at()
        for request in requests:
            remote.on_dequeued(request.request_id)
        remote.drain_events()

    return live


def test_operations_of_a_burst_of_requests() -> None:
    assert_linear(fetches, (512, 1024, 4096))


def test_no_lie_of_the_other_side_harms_this_engine() -> None:
    """A whole fetch, one of whose messages has another value: all ends, and what came of it can be."""
    top = TokenLogprobs(-0.5, 1, [1, 2], [-0.5, -1.0])
    token = msgspec.structs.replace(prefilled(), logprobs=top)
    part = KVPart(layer=0, kind="keys", first_head=0, num_heads=1, head_bytes=64)
    rank = KVRank(parts=(part,), num_blocks=64, descriptors={"tcp": b"x"})
    greeting = KVWelcome(engine_id="e", peer=KVPeer(peer_id="e-1", ranks=(rank,)), lease_s=30.0)
    news = [greeting, blocks(0, [10, 11, 12]), blocks(3, [13, 14, 15, 16, 17]), token]
    ends = [KVRenewed(), KVDropped(T, "why"), KVRefused("no"), KVCheckResult(T, is_valid=True)]
    decode = Codec[PrefillMessage](PrefillMessage).decode
    refused = told = 0
    for index, message in enumerate([*news, *ends]):
        for payload in lies(message):
            try:
                lie: PrefillMessage | PeerLost = decode(payload)
            except msgspec.DecodeError:
                lie, refused = PeerLost("it sent what is not a message"), refused + 1
            told += 1
            _live_with(news, index, lie)
    assert refused > told / 4


def _live_with(news: list[PrefillMessage], index: int, lie: PrefillMessage | PeerLost) -> None:
    rig = Rig()
    rig.remote.on_queued(prefix(), 2)
    for number in range(len(news)):
        rig.hear(lie if number == index else news[number])
        if number == 1 and rig.remote.lookup(prefix(), 2) and "r" in rig.remote.fetches:
            rig.load(2, 6)
    for transfer in rig.ledger.drain():
        rig.end(transfer)
    rig.hear(*([lie] if index >= len(news) else []), KVCheckResult(T, is_valid=True))
    for _ in range(8):
        rig.pass_time(10.0)  # what the other side owes is given up
    for event in rig.remote.drain_events():
        assert not isinstance(event, Arrived) or event.token.token_id < READY.vocab_size
    rig.remote.on_dequeued("r")
    assert not rig.remote.fetches
    assert rig.remote.next_event_at() is None
