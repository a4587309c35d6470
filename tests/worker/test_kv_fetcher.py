# SPDX-License-Identifier: Apache-2.0
"""KV comes to engines of any topology from those of any other, byte for byte; what fails ends a transfer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from family_models import make_model as make_family
from kv_ranks import NUM_BLOCKS, Engine, topology
from tiny_models import make_model, save_model

from pagoda.errors import ConfigError, TransportError
from pagoda.messages.transfers import KVPeer
from pagoda.messages.worker_config import Role
from pagoda.parallel.config import ParallelConfig
from pagoda.plugins.disaggregation.transport.tcp import TcpDescriptor
from pagoda.plugins.disaggregation.worker import fetcher
from pagoda.worker.kv.jobs import Jobs

MakeEngine = Callable[..., Engine]

SOURCES, TARGETS = [3, 4, 5, 9, 0, 11], [0, 1, 2, 7, 8, 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    # Four KV heads, so that four ranks have one each; four layers, for stages.
    make_model("llama", num_hidden_layers=4).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two")
    save_model("qwen3", directory)
    return directory


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("windows")
    make_family("gemma3").save_pretrained(directory)
    return directory


@pytest.fixture
def make() -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(*args: Any, **options: Any) -> Engine:
        made.append(Engine(*args, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def both(
    make: MakeEngine,
    model: Path,
    prefill: ParallelConfig | None = None,
    decode: ParallelConfig | None = None,
    **options: Any,
) -> tuple[Engine, Engine]:
    one = make(model, prefill or topology(), Role.PREFILL, **options)
    other = make(model, decode or topology(), Role.DECODE, **options)
    assert one.digests == other.digests
    assert len(one.digests) == 1
    other.add_peer(one.peer())
    return one, other


TOPOLOGIES = [
    (topology(), topology()),
    (topology(tp=2), topology()),
    (topology(), topology(tp=2)),
    (topology(tp=4), topology(tp=2)),
    (topology(tp=2), topology(tp=4)),
    (topology(pp=2), topology()),
    (topology(), topology(pp=2)),
    (topology(tp=2, pp=2), topology(pp=4)),
    (topology(pp=2), topology(tp=4)),
]


def names(value: object) -> str:
    if isinstance(value, ParallelConfig):
        return f"tp{value.tensor_parallel_size}-pp{value.pipeline_parallel_size}"
    return str(value)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("prefill", "decode"), TOPOLOGIES, ids=names)
def test_any_topology_reads_any_other(
    make: MakeEngine,
    model: Path,
    prefill: ParallelConfig,
    decode: ParallelConfig,
    transport: str,
) -> None:
    _, engine = both(make, model, prefill, decode, transports=(transport,))
    engine.read_and_check(SOURCES, TARGETS)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (topology(), topology()),
        (topology(tp=2), topology(pp=2)),
        (topology(pp=3), topology(tp=2)),
        (topology(pp=2), topology(tp=2, pp=3)),
    ],
    ids=names,
)
def test_layers_of_several_groups_share_memory(
    make: MakeEngine, windows: Path, prefill: ParallelConfig, decode: ParallelConfig
) -> None:
    """Layers of some groups are on other stages there than here, and some ranks have none of a group."""
    _, engine = both(make, windows, prefill, decode, max_model_len=32)
    num_groups = len(engine.ranks[0].plan.kv_groups)
    assert num_groups == 6
    read = {group: ([group + 6], [5 - group]) for group in range(num_groups)}
    read[2] = ([2, 8], [9, 3])
    ids = [engine.begin(*blocks, group=group) for group, blocks in read.items()]
    ends = engine.wait(len(read))
    assert sorted(ends) == ids
    assert all(not end.failed for several in ends.values() for end in several)
    engine.check_groups(read)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(4, 1), (1, 4), (4, 2), (2, 4), (4, 4)],
)
def test_heads_that_several_ranks_have(
    make: MakeEngine, two_heads: Path, prefill: int, decode: int
) -> None:
    _, engine = both(make, two_heads, topology(tp=prefill), topology(tp=decode))
    engine.read_and_check(SOURCES, TARGETS)


@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16", "float32"])
def test_every_layout(make: MakeEngine, model: Path, backend: str, kv_dtype: str) -> None:
    options = {"backend": backend, "kv_cache_dtype": kv_dtype}
    _, engine = both(make, model, topology(tp=2), topology(), **options)
    engine.read_and_check(SOURCES, TARGETS)


def test_several_transfers_in_small_batches(
    make: MakeEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "BATCH_BYTES", 1)
    _, engine = both(make, model, topology(tp=2), topology())
    pieces = [range(6), range(6, 9), range(9, NUM_BLOCKS)]
    ids = [engine.begin(blocks, blocks) for blocks in pieces]
    ends = engine.wait(len(pieces))
    assert sorted(ends) == ids
    assert all(not end.failed for several in ends.values() for end in several)
    engine.check(range(NUM_BLOCKS), range(NUM_BLOCKS))


def test_nothing_is_written_before_the_step_is_done(make: MakeEngine, model: Path) -> None:
    _, engine = both(make, model)
    engine.read([], [])
    transfer_id = engine.begin(SOURCES, TARGETS, after_step=7)
    engine.step_done(6)
    assert not engine.has_ended()
    engine.check([], [])
    engine.step_done(7)
    assert engine.wait()[transfer_id][0].failed == []
    engine.check(SOURCES, TARGETS)


# ---- what goes wrong


def all_failed(engine: Engine, sources: list[int], targets: list[int]) -> str:
    (end,) = engine.read(sources, targets)
    assert end.failed == list(range(len(sources)))
    assert end.error
    return end.error


def test_a_peer_that_has_gone(make: MakeEngine, model: Path) -> None:
    prefill, engine = both(make, model)
    engine.read([0], [0])
    prefill.close_exports()
    error = all_failed(engine, SOURCES, TARGETS)
    assert "shm: " in error, error
    assert "tcp: " in error


def test_a_peer_that_is_back_at_once_is_read_again(make: MakeEngine, model: Path) -> None:
    """The link is gone, but not the memory: a new one is made."""
    _, engine = both(make, model, transports=("tcp",))
    engine.read([0], [0])
    (worker,) = engine.workers
    (reader,) = worker.fetcher.peers["prefill-1"].readers
    assert reader.link is not None
    reader.link.close()
    assert engine.read(SOURCES, TARGETS)[0].failed == []


def test_a_transport_that_does_not_work_is_passed_over(make: MakeEngine, model: Path) -> None:
    prefill, engine = both(make, model)
    (rank,) = prefill.described()
    broken = msgspec.structs.replace(rank, descriptors=rank.descriptors | {"shm": b"nonsense"})
    engine.add_peer(KVPeer(peer_id="other", ranks=(broken,)))
    transfer_id = engine.begin(SOURCES, TARGETS, "other")
    assert engine.wait()[transfer_id][0].failed == []
    engine.check(SOURCES, TARGETS)


def test_a_peer_without_ranks_ends_transfers_and_no_worker(make: MakeEngine, model: Path) -> None:
    _, engine = both(make, model)
    engine.add_peer(KVPeer(peer_id="other", ranks=()))
    transfer_id = engine.begin(SOURCES, TARGETS, "other")
    assert set(engine.wait()[transfer_id][0].failed) == set(range(len(SOURCES)))
    assert engine.read(SOURCES, TARGETS)[0].failed == []


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ({"transports": ("shm",)}, {"transports": ("tcp",)}, "over shm, this one reads over tcp"),
        ({"secret": b"another secret of theirs"}, {}, "cluster's key"),
        (
            {"kv_cache_dtype": "bfloat16"},
            {"kv_cache_dtype": "float32"},
            "bytes per block, here they have",
        ),
    ],
)
def test_engines_that_do_not_go_together(
    make: MakeEngine, model: Path, prefill: dict[str, Any], decode: dict[str, Any], reason: str
) -> None:
    engine = make(model, topology(), Role.DECODE, **decode)
    assert "nobody knows" in all_failed(engine, SOURCES, TARGETS)
    engine.add_peer(make(model, topology(), Role.PREFILL, **prefill).peer())
    assert reason in all_failed(engine, SOURCES, TARGETS)
    engine.check([], [])


@pytest.mark.parametrize("block", [-1, NUM_BLOCKS, 2**40])
def test_blocks_that_the_peer_does_not_have(make: MakeEngine, model: Path, block: int) -> None:
    _, engine = both(make, model)
    assert "12 blocks" in all_failed(engine, [0, block], [0, 1])
    engine.check([], [])


@pytest.mark.parametrize("block", [-1, NUM_BLOCKS])
def test_blocks_that_are_not_here_are_an_engines_fault(
    make: MakeEngine, model: Path, block: int
) -> None:
    _, engine = both(make, model)
    with pytest.raises(ValueError, match="blocks that are not here"):
        engine.begin([0], [block])


def test_a_transfer_may_take_as_long_as_its_batches_come(
    make: MakeEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch of a large transfer takes nearly as long as it may."""
    monkeypatch.setattr(fetcher, "BATCH_BYTES", 1)
    skipped_s = 0.0

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + skipped_s

    class SlowLink:
        def read(self, _spans: object, deadline: float) -> None:
            nonlocal skipped_s
            skipped_s += fetcher.BATCH_LIMIT_S - 1
            if Clock.monotonic() > deadline:
                raise TransportError("it took too long")

        def close(self) -> None:
            pass

    monkeypatch.setattr(fetcher, "time", Clock)
    prefill = make(model, topology(), Role.PREFILL)
    engine = make(model, topology(), Role.DECODE)
    (worker,) = engine.workers
    worker.fetcher.connect = lambda _rank, _deadline: SlowLink()
    engine.add_peer(prefill.peer())
    assert engine.read(SOURCES, TARGETS)[0].failed == []


@pytest.fixture
def silence() -> Iterator[socket.socket]:
    """A door that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        yield listener


def silent_peer(prefill: Engine, silence: socket.socket) -> KVPeer:
    port = silence.getsockname()[1]
    descriptor = TcpDescriptor("127.0.0.1", port, bytes(16), encrypts=False)
    descriptors = {"tcp": msgspec.msgpack.encode(descriptor)}
    ranks = [msgspec.structs.replace(rank, descriptors=descriptors) for rank in prefill.described()]
    return KVPeer(peer_id="silent", ranks=tuple(ranks))


def test_a_peer_that_is_silent_does_not_keep_others_waiting(
    make: MakeEngine, model: Path, silence: socket.socket
) -> None:
    prefill, engine = both(make, model)
    engine.add_peer(silent_peer(prefill, silence))
    engine.begin([0], [11], "silent")
    guest, _ = silence.accept()
    engine.read_and_check(SOURCES, TARGETS)
    guest.close()


def test_a_silent_peer_that_parts_ends_its_transfers(
    make: MakeEngine, model: Path, silence: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.plugins.disaggregation.transport.tcp.HANDSHAKE_S", 0.5)
    prefill, engine = both(make, model)
    engine.add_peer(silent_peer(prefill, silence))
    ids = [engine.begin([0, 1], [2, 3], "silent") for _ in range(3)]
    guest, _ = silence.accept()
    engine.remove_peer("silent")
    ends = engine.wait(3)
    assert sorted(ends) == ids
    assert all(end.failed == [0, 1] for (end,) in ends.values())
    engine.check([], [])
    guest.close()


def test_a_peer_that_parts_ends_transfers_that_wait_for_a_step(
    make: MakeEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, wait_for_step = threading.Event(), Jobs.wait_for_step

    def wait(jobs: Jobs, step: int, is_over: Callable[[], bool]) -> bool:
        def asked() -> bool:  # with the lock held, which is left only to wait
            waits.set()
            return is_over()

        return wait_for_step(jobs, step, asked)

    monkeypatch.setattr(Jobs, "wait_for_step", wait)
    _, engine = both(make, model)
    transfer_id = engine.begin(SOURCES, TARGETS, after_step=3)
    waits.wait()
    assert not engine.has_ended()
    engine.remove_peer("prefill-1")
    (end,) = engine.wait()[transfer_id]
    assert end.failed == list(range(len(SOURCES)))
    assert "has parted" in end.error
    engine.check([], [])


def test_a_rank_that_cannot_be_reached_is_left_alone_for_a_while(
    make: MakeEngine, model: Path
) -> None:
    prefill, engine = both(make, model)
    (worker,) = engine.workers
    (reader,) = worker.fetcher.peers["prefill-1"].readers
    connect, attempts = reader.connect, []

    def counted(*args: Any) -> Any:
        attempts.append(args)
        return connect(*args)

    reader.connect = counted
    prefill.close_exports()
    errors = {all_failed(engine, SOURCES, TARGETS) for _ in range(3)}
    assert len(attempts) == len(errors) == 1


def test_an_idle_link_is_closed_by_the_thread_that_reads(
    make: MakeEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some need a while for it, and whoever parts does not wait."""
    _, engine = both(make, model, transports=("tcp",))
    engine.read([0], [0])
    (worker,) = engine.workers
    (reader,) = worker.fetcher.peers["prefill-1"].readers
    assert reader.link is not None
    closers: list[threading.Thread] = []
    monkeypatch.setattr(reader.link, "close", lambda: closers.append(threading.current_thread()))
    engine.remove_peer("prefill-1")
    reader.tasks.join()
    assert closers == reader.tasks.threads


def test_a_peer_that_dies_in_the_middle(
    make: MakeEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that came before are good, the others are reported, and nothing is left that writes."""
    monkeypatch.setattr(fetcher, "BATCH_BYTES", 1)
    prefill, engine = both(make, model, topology(tp=2), topology())
    (worker,) = engine.workers
    reader = worker.fetcher.peers["prefill-1"].readers[1]
    read, num_reads = reader.read, 0

    def read_until_the_third(sources: list[int], targets: list[int], deadline: float) -> None:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 3:
            prefill.close_exports()
        read(sources, targets, deadline)

    monkeypatch.setattr(reader, "read", read_until_the_third)
    (end,) = engine.read(SOURCES, TARGETS)
    assert end.failed, (
        "the first rank may have failed earlier, the second has from the third block on"
    )
    assert end.failed == list(range(end.failed[0], len(SOURCES)))
    assert end.failed[0] <= 2
    good = end.failed[0]
    (rank,) = engine.ranks
    for layer, kind, tensor in rank.tensors():
        expected = rank.whole(layer, kind, tensor)[SOURCES[:good]]
        assert tensor[TARGETS[:good]].equal(expected)


def test_ending_the_worker_ends_what_waits(make: MakeEngine, model: Path) -> None:
    prefill, engine = both(make, model)
    prefill.close()
    engine.begin(SOURCES, TARGETS, after_step=3)
    engine.close()
    assert [end.failed for (end,) in engine.wait().values()] == [list(range(len(SOURCES)))]
    engine.check([], [])
    assert not [thread for thread in threading.enumerate() if "kv-" in thread.name]


def test_no_transport_that_works(make: MakeEngine, model: Path) -> None:
    with pytest.raises(ConfigError, match="no transport of --kv-transports works"):
        make(model, topology(), Role.PREFILL, transports=())


def test_a_rank_on_another_host_is_reached_there(make: MakeEngine, model: Path) -> None:
    prefill = make(model, topology(), Role.PREFILL, transports=("tcp",), bind_host="127.0.0.2")
    (rank,) = prefill.described()
    assert msgspec.msgpack.decode(rank.descriptors["tcp"], type=TcpDescriptor).host == "127.0.0.2"
    engine = make(model, topology(), Role.DECODE)
    engine.add_peer(prefill.peer())
    engine.read_and_check(SOURCES, TARGETS)
