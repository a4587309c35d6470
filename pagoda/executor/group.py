# SPDX-License-Identifier: Apache-2.0
"""The workers of one replica as one executor: they start together, get the same plans, and are lost together."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Container, Sequence
from functools import cached_property
from typing import Literal

import msgspec
import zmq

from pagoda.executor.agreement import disagreement, joined
from pagoda.executor.base import STEP_TIMEOUT_SUSPICION, ExecutorEvent, WorkerLost, max_in_flight
from pagoda.executor.group_adapters import GroupAdapters
from pagoda.executor.group_transfers import GroupTransfers
from pagoda.executor.launcher import Launcher, WorkerSet, worker_name
from pagoda.executor.standstill import Standstill
from pagoda.faults.injector import Faults, instance
from pagoda.ipc.addresses import allow_ipv6
from pagoda.ipc.clock import Clock
from pagoda.ipc.codec import Codec
from pagoda.ipc.curve import encrypt_server, new_keys, start_authenticator
from pagoda.ipc.door import Door
from pagoda.messages.adapters import Adapter, AdapterLoaded, LoadAdapter, UnloadAdapter
from pagoda.messages.tracing import ClockPing, ClockPong, StartTrace, StopTrace, TraceStopped
from pagoda.messages.transfers import (
    TierWord,
    TransferEnd,
    TransferLink,
    TransferMessage,
    Transfers,
)
from pagoda.messages.worker import (
    PROTOCOL_VERSION,
    KVSize,
    StepPlan,
    StepResult,
    TokenMasks,
    WorkerFailed,
    WorkerHello,
    WorkerMessage,
    WorkerOrder,
    WorkerPeers,
    WorkerReady,
    WorkerRoom,
)
from pagoda.messages.worker_config import CurveKeys, WorkerConfig
from pagoda.telemetry.tracer import Tracer, TraceSession

_log = logging.getLogger(__name__)

_Wait = Literal["word", "hello", "start", "step", "transfer", "parting", "connection"]
_Decode = Callable[[bytes], WorkerMessage | TransferMessage]

_PATIENCE_S = 30.0
"""Seconds after which the log names workers that have not said hello."""
_HANG_UP_S = 1.0
"""Seconds without a connection after which a worker counts as lost."""
_PARTING_S = 0.1
"""Seconds after which a connection that has ended is known to the socket to have ended."""
_HEARTBEATS = 4
"""Signs of life that a worker is asked for within its time-out."""


class GroupExecutor:
    """One worker for each rank of a replica, all reached through one ZeroMQ router socket.

    Several workers first say hello; when all have, each learns of its peers, and they form their groups and load.
    Then each says for how many KV blocks it has room, and all take the fewest.
    Every plan goes to all ranks; the one that samples answers. Every start uses a new socket, and on TCP new keys,
    so nothing of a lost worker can be mistaken for its successor's.
    With KV tiers each worker connects a second time, for transfers alone, which begin and end beside the steps.
    """

    def __init__(
        self,
        config: WorkerConfig,
        launcher: Launcher,
        *,
        address: str,
        step_timeout_s: float,
        start_timeout_s: float = 600.0,
        worker_timeout_s: float = 15.0,
        clock: Clock,
        tracer: Tracer | None = None,
        faults: Faults | None = None,
    ) -> None:
        """`config.place` says which replica this is; the ranks' own places are filled in.

        `address` is where workers reach the engine: `ipc://` and a path in a private directory, to which a
        number is appended per start, or `tcp://` and an address of this host, at which each start takes a free
        port, with new keys. Workers are lost when one step takes longer than `step_timeout_s`, or when all are
        silent for `start_timeout_s` before the last of them is ready. A thread of ZeroMQ answers for a process
        that runs, whatever it does; workers are lost when one is stopped for `worker_timeout_s`, or has not
        connected within the launcher's `first_word_s`. Time for which this process stood still counts for none of
        these. `tracer` has the clock that workers compare theirs with; `faults` are those of this process.
        """
        self._config = config
        self._launcher = launcher
        self._address = address
        self._step_timeout_s = step_timeout_s
        self._start_timeout_s = start_timeout_s
        self._worker_timeout_s = worker_timeout_s
        self._clock = clock
        self.tracer = tracer or Tracer("engine")
        self._encode_order = Codec[WorkerOrder](WorkerOrder).encode
        self._encode_transfers = Codec[Transfers](Transfers).encode
        self._num_starts = 0
        self._faults = faults or Faults(None)
        self._take_message = self._faults.messages("engine.result", _Group.decode)
        self._send_plan = self._faults.messages("engine.plan", self._to_ranks)
        self._send_transfers = self._faults.messages("engine.transfers", self._to_links)
        self._adapters = GroupAdapters(config.adapters, config.parallel.replica_size)
        self._group: _Group | None = None
        self._standstill = Standstill(clock.now())
        self._news: list[ExecutorEvent] = []
        """Events for `poll` that do not come from workers."""
        self.max_in_flight = max_in_flight(config.parallel.pipeline_parallel_size)

    def start(self, num_blocks: int | None = None) -> None:
        self._num_starts += 1
        if num_blocks is not None:
            of_rank = num_blocks // self._config.parallel.num_pools
            self._config = msgspec.structs.replace(self._config, kept_blocks=of_rank)
        if self._address.startswith("tcp://"):
            keys, address = new_keys(), f"{self._address}:*"
        else:
            keys, address = None, f"{self._address}-{self._num_starts}"
        self._config = msgspec.structs.replace(self._config, adapters=self._adapters.start())
        parallel = self._config.parallel
        faults = instance(self._config.faults, self._num_starts)
        configs = [
            msgspec.structs.replace(self._config, place=place, curve=keys, faults=faults)
            for place in parallel.places(self._config.place.dp)
        ]
        self._group = _Group(
            configs,
            address,
            keys,
            self._launcher.launch,
            self._step_timeout_s,
            self._worker_timeout_s,
            self._take_message,
        )
        now = self._clock.now()
        self._standstill = Standstill(now)
        self._group.deadlines["word"] = now + self._launcher.first_word_s
        self._group.deadlines["start"] = now + self._start_timeout_s
        if len(configs) > 1:
            self._group.deadlines["hello"] = now + _PATIENCE_S

    @property
    def workers(self) -> WorkerSet | None:
        return self._group.workers if self._group else None

    def submit(self, plan: StepPlan) -> None:
        group = self._group
        if group is None:
            raise RuntimeError("A plan was submitted without a worker.")
        now = self._clock.now()
        self._send_plan(group, now, self._encode_order(plan))
        group.num_in_flight += 1
        group.deadlines.setdefault("step", now + self._step_timeout_s)

    @staticmethod
    def _to_ranks(group: _Group, now: float, payload: bytes) -> None:
        group.send(group.ranks, payload, now)

    @staticmethod
    def _to_links(group: _Group, ranks: Sequence[int], now: float, payload: bytes) -> None:
        group.send([group.links[rank] for rank in ranks], payload, now)

    def submit_masks(self, masks: TokenMasks) -> None:
        group = self._group
        if group is None:
            raise RuntimeError("Masks were submitted without a worker.")
        group.send([group.sampling_identity], self._encode_order(masks), self._clock.now())

    def submit_transfers(self, message: Transfers) -> None:
        group = self._group
        if group is None:
            raise RuntimeError("Transfers were submitted without a worker.")
        now = self._clock.now()
        for ranks, part in group.transfers.pools.messages(message):
            self._send_transfers(group, ranks, now, self._encode_transfers(part))
        group.transfers.begin(message.transfers, now)
        group.await_transfers()

    def load_adapter(self, adapter: Adapter) -> None:
        self._adapters.load(adapter)
        self._tell_of_adapters()

    def unload_adapter(self, digest: str) -> None:
        self._adapters.unload(digest)
        self._tell(UnloadAdapter(digest))

    def _tell_of_adapters(self) -> None:
        """Tells workers that are ready of adapters that they do not know; starting workers do not listen."""
        if self._group is not None and self._group.is_ready:
            for adapter in self._adapters.take_orders():
                self._tell(LoadAdapter(adapter))

    def _tell(self, order: WorkerOrder) -> None:
        if (group := self._group) is not None and group.is_ready:
            group.send(group.ranks, self._encode_order(order), self._clock.now())

    def start_trace(self, session: TraceSession) -> None:
        session = self.tracer.session_for_children(session)
        self._config = msgspec.structs.replace(self._config, trace=session)
        self._tell_of_trace()

    def stop_trace(self) -> None:
        self._config = msgspec.structs.replace(self._config, trace=None)
        group = self._group
        if group is None or not group.is_ready:
            self._news.append(TraceStopped())  # those that still start will be told
        else:
            self._tell_of_trace()
            group.await_trace_end()

    def _tell_of_trace(self) -> None:
        """Sends the trace order to workers that are ready; starting workers do not listen."""
        group, session = self._group, self._config.trace
        if group is None or not group.is_ready:
            return
        group.trace = session
        self._tell(StopTrace() if session is None else StartTrace(session))

    def poll(self) -> list[ExecutorEvent]:
        news, self._news = self._news, []
        return [*news, *self._poll_group()]

    def _poll_group(self) -> list[ExecutorEvent]:
        group = self._group
        if group is None:
            return []
        group.postpone(self._standstill.look(self._clock.now()))
        lost = group.workers.lost()  # before the socket is read: a last message is not overlooked
        events, has_heard = list[ExecutorEvent](), False
        try:
            received = group.receive()
        except msgspec.DecodeError as error:
            problem = f"a worker sent what is not a message ({error})"
            return [self._lose(lost or WorkerLost(problem, suspicion=0))]
        for rank, message in received:
            has_heard = True
            match message:
                case WorkerFailed():
                    # A worker that was lost makes those fail that were talking to it: it is the one to name.
                    first = None if message.is_user_error else lost
                    return [*events, self._lose(first or group.failure(rank, message))]
                case (
                    WorkerHello(protocol_version=version) | WorkerReady(protocol_version=version)
                ) if version != PROTOCOL_VERSION:
                    return [*events, self._lose(group.refusal(rank, version))]
                case WorkerHello():
                    group.greet(rank, message, self._clock.now())
                case WorkerRoom():
                    group.take_room(rank, message, self._clock.now())
                case WorkerReady() | TransferLink():
                    event = group.take_ready(rank, message)
                    if isinstance(event, WorkerLost):
                        return [*events, self._lose(event)]
                    if event is not None:
                        events.append(event)
                        if self._config.trace != group.trace:
                            self._tell_of_trace()
                        events += self._adapters.ready()
                        self._tell_of_adapters()
                case AdapterLoaded():
                    loaded = self._adapters.answered(rank, message)
                    events += [] if loaded is None else [loaded]
                case ClockPing(number):
                    pong = ClockPong(number, self.tracer.process.uid, self.tracer.clock_ns())
                    group.send([group.ranks[rank]], self._encode_order(pong), self._clock.now())
                case TraceStopped():
                    events += group.take_trace_end(rank, message)
                case TransferEnd():
                    end = group.transfers.end(rank, message, self._clock.now())
                    events += [end] if end is not None else []
                    group.await_transfers()
                case TierWord():
                    events.append(message)
                case StepResult():
                    group.num_in_flight -= 1
                    group.deadlines.pop("step", None)
                    if group.num_in_flight:
                        group.deadlines["step"] = self._clock.now() + self._step_timeout_s
                    events.append(message)
        now = self._clock.now()
        group.look_for_gone(now)
        if group.all_were_heard:
            group.deadlines.pop("word", None)
        elif not group.workers.are_placed:
            group.deadlines["word"] = now + self._launcher.first_word_s
        if group.has_started:
            group.deadlines.pop("start", None)
        elif has_heard or not group.workers.are_placed:
            group.deadlines["start"] = now + self._start_timeout_s
        loss = lost
        if loss is None and (overdue := self._overdue(group, now)) is not None:
            loss = group.workers.explained(overdue)
        if loss is not None:
            events.append(self._lose(loss))
        return events

    def _overdue(self, group: _Group, now: float) -> WorkerLost | None:
        over = [wait for wait, at in group.deadlines.items() if now >= at]
        if "hello" in over:
            group.complain()
        if "connection" in over:
            return group.unreachable
        if "word" in over:
            return group.mute(self._launcher.first_word_s)
        if "start" in over:
            return group.hung_start(self._start_timeout_s)
        if "step" in over:
            return WorkerLost(
                f"a step took longer than {self._step_timeout_s:g} s",
                suspicion=STEP_TIMEOUT_SUSPICION,
            )
        if "transfer" in over:
            return WorkerLost(f"no KV transfer ended within {self._step_timeout_s:g} s")
        return None

    def _lose(self, loss: WorkerLost) -> WorkerLost:
        self.close()
        return loss

    def pollables(self) -> list[object]:
        group = self._group
        return [group.socket, group.monitor, *group.workers.pollables()] if group else []

    def pids(self) -> dict[str, int]:
        return self._group.pids() if self._group else {}

    def next_event_at(self) -> float | None:
        if self._group is None:
            return None
        deadline = min(self._group.deadlines.values(), default=None)
        return self._standstill.next_look_at(deadline)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class _Group:
    def __init__(
        self,
        configs: list[WorkerConfig],
        address: str,
        keys: CurveKeys | None,
        launch: Callable[[list[WorkerConfig], str], WorkerSet],
        transfer_timeout_s: float,
        worker_timeout_s: float,
        take_message: Callable[[_Group, bytes, bytes], None],
    ) -> None:
        """`take_message` passes each message on to `decode`."""
        self._take_message = take_message
        self._configs = configs
        self._worker_timeout_s = worker_timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        parallel, dp = configs[0].parallel, configs[0].place.dp
        self._sampling_rank = parallel.rank_in_replica(parallel.sampling_place(dp))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        # A worker that connects anew after its network was gone takes the place of its old connection.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # A message that cannot be sent raises an error instead of being lost in silence.
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # The worker's thread of ZeroMQ answers, also while the interpreter loads a library or waits for a device.
        heartbeat_ms = max(1, round(worker_timeout_s * 1000 / _HEARTBEATS))
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, heartbeat_ms)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, (_HEARTBEATS - 1) * heartbeat_ms)
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(Door.EVENTS)
        """Becomes readable when a connection has begun or ended."""
        if keys is not None:
            start_authenticator(self._context, keys)
            encrypt_server(self.socket, keys)
        allow_ipv6(self.socket, address)
        self.socket.bind(address)
        ranks = range(len(configs))
        self.ranks = [b"%d" % rank for rank in ranks]
        self.links = [b"kv-%d" % rank for rank in ranks if configs[0].has_transfer_link]
        """ZeroMQ identities of the workers' connections, by rank in the replica."""
        self.sampling_identity = self.ranks[self._sampling_rank]
        self._connections = _connections(self.ranks, WorkerMessage)
        self._connections |= _connections(self.links, TransferMessage)
        self._hellos: dict[int, WorkerHello] = {}
        self._rooms: dict[int, WorkerRoom] = {}
        self._readies: dict[int, WorkerReady] = {}
        """Hellos, rooms and readies are keyed by rank in the replica."""
        self._door, self._heard = Door(), set[bytes]()
        """`_heard` are connections on which something has come."""
        self._linked: set[int] = set()
        """Ranks whose connections for transfers are there."""
        self._received: list[tuple[int, WorkerMessage | TransferMessage]] = []
        self.deadlines: dict[_Wait, float] = {}
        """Times until which each must have sent its first message; all must have said hello, or the log names who
        has not; one that starts must have sent a message; the step in flight, and a transfer, must have ended; it
        is known who has hung up; and the end of an unreachable worker's process is known."""
        self.unreachable: WorkerLost | None = None
        """A worker without a connection, which has missed a message."""
        self.num_in_flight = 0
        self.trace = configs[0].trace
        self._trace_ends_of: set[int] = set()
        self._trace_problems: list[str] = []
        self._endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.workers = launch(configs, self._endpoint)

    @cached_property
    def transfers(self) -> GroupTransfers:
        """Transfers under way; made for the first of them, when all ranks are ready."""
        parallel, readies = self._configs[0].parallel, list(self._readies.values())
        return GroupTransfers.of(parallel, readies, self._transfer_timeout_s)

    def await_transfers(self) -> None:
        """Notes until when the next transfer must have ended."""
        deadline = self.transfers.deadline
        if deadline is None:
            self.deadlines.pop("transfer", None)
        else:
            self.deadlines["transfer"] = deadline

    def postpone(self, seconds: float) -> None:
        """Gives workers so much longer: the engine, and perhaps they, did not run."""
        if seconds:
            _log.warning(
                "the engine stood still for %.1f s; its workers get as much longer", seconds
            )
            self.deadlines = {wait: at + seconds for wait, at in self.deadlines.items()}
            if "transfer" in self.deadlines:
                self.transfers.postpone(seconds)

    @property
    def all_were_heard(self) -> bool:
        return self._heard.issuperset(self.ranks)

    @property
    def is_ready(self) -> bool:
        """True if all ranks are ready, apart from their connections for transfers."""
        return len(self._readies) == len(self._configs)

    @property
    def has_started(self) -> bool:
        """All ranks are ready, and so are their connections for transfers."""
        return self.is_ready and len(self._linked) == len(self.links)

    def pids(self) -> dict[str, int]:
        pids = self.workers.pids
        return {
            config.place.role: pids[name]
            for config in self._configs
            if (name := worker_name(config)) in pids
        }

    def send(self, identities: Sequence[bytes], payload: bytes, now: float) -> None:
        for identity in identities:
            try:
                self.socket.send_multipart([identity, payload])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                if self.unreachable is None:
                    rank, _ = self._connections[identity]
                    self.unreachable = WorkerLost(
                        f"{worker_name(self._configs[rank])} hung up, or was silent for "
                        f"{self._worker_timeout_s:g} s"
                    )
                    self.deadlines["connection"] = now + _HANG_UP_S

    def look_for_gone(self, now: float) -> None:
        """Finds who it is that hung up, or was silent for too long, if any has: the socket does not name it."""
        with contextlib.suppress(zmq.Again):
            while event := self.monitor.recv_multipart(zmq.NOBLOCK):
                if self._door.take(event):
                    self.deadlines["parting"] = now + _PARTING_S
        if now >= self.deadlines.get("parting", math.inf):
            del self.deadlines["parting"]
            # What changes nothing for those that are there.
            ranks = self._heard.intersection(self.ranks)
            links = self._heard.intersection(self.links)
            self.send(sorted(ranks), msgspec.msgpack.encode(ClockPong(0, "", 0)), now)
            self.send(sorted(links), msgspec.msgpack.encode(Transfers()), now)

    def receive(self) -> list[tuple[int, WorkerMessage | TransferMessage]]:
        """Returns the messages that have arrived, each with the rank of its sender.

        Raises msgspec.DecodeError if a message cannot be read, or came on a connection for other messages.
        """
        with contextlib.suppress(zmq.Again):
            while True:
                identity, *parts = self.socket.recv_multipart(zmq.NOBLOCK)
                self._take_message(self, identity, b"".join(parts))
        messages, self._received = self._received, []
        return messages

    def decode(self, identity: bytes, payload: bytes) -> None:
        """Takes a message that came on the connection `identity`. Raises what `receive` does."""
        if identity not in self._connections:
            _log.warning("a connection that is no worker's is not heard")
            return
        rank, decode = self._connections[identity]
        self._heard.add(identity)
        self._received.append((rank, decode(payload)))

    def greet(self, rank: int, hello: WorkerHello, now: float) -> None:
        """Notes the hello of one rank; the last hello makes all ranks known to each other."""
        self._hellos[rank] = hello
        if len(self._hellos) < len(self._configs):
            return
        self.deadlines.pop("hello", None)
        hellos = [self._hellos[rank] for rank in range(len(self._configs))]
        self.send(self.ranks, msgspec.msgpack.encode(WorkerPeers(hellos=hellos)), now)

    def take_room(self, rank: int, room: WorkerRoom, now: float) -> None:
        """Notes for how many blocks one rank has room; with the last one's, all are told the fewest."""
        self._rooms[rank] = room
        if len(self._rooms) == len(self._configs):
            size = KVSize(min(room.num_blocks for room in self._rooms.values()))
            self.send(self.ranks, msgspec.msgpack.encode(size), now)

    def take_ready(
        self, rank: int, message: WorkerReady | TransferLink
    ) -> WorkerReady | WorkerLost | None:
        """Returns one event for all workers, once the last rank is ready and all transfer links are there."""
        if isinstance(message, WorkerReady):
            self._readies[rank] = message
        else:
            self._linked.add(rank)
        if not self.has_started:
            return None
        problem = disagreement(self._readies.values())
        if problem is not None:
            return WorkerLost(problem, is_user_error=True)
        readies = [self._readies[rank] for rank in range(len(self._configs))]
        return joined(readies, self._sampling_rank, self._configs[0].parallel)

    def await_trace_end(self) -> None:
        self._trace_ends_of = set(range(len(self._configs)))
        self._trace_problems = []

    def take_trace_end(self, rank: int, message: TraceStopped) -> list[TraceStopped]:
        """Returns one event for all workers, once the last rank that was asked has stopped."""
        if rank not in self._trace_ends_of:
            return []
        self._trace_ends_of.discard(rank)
        self._trace_problems += message.problems
        return [] if self._trace_ends_of else [TraceStopped(self._trace_problems)]

    def complain(self) -> None:
        del self.deadlines["hello"]
        _log.warning("still waiting for %s at %s", self._others(self._hellos), self._endpoint)

    def refusal(self, rank: int, version: int) -> WorkerLost:
        error = (
            f"the worker speaks protocol {version}, the engine {PROTOCOL_VERSION}; install the same version of "
            "Pagoda on all hosts."
        )
        return self.failure(rank, WorkerFailed(error, is_user_error=True))

    def mute(self, timeout_s: float) -> WorkerLost:
        """The loss of workers whose processes have not connected within `timeout_s`."""
        heard = [rank for rank, identity in enumerate(self.ranks) if identity in self._heard]
        return WorkerLost(f"{self._others(heard)} did not connect within {timeout_s:g} s")

    def hung_start(self, timeout_s: float) -> WorkerLost:
        """The loss of workers that made no progress for `timeout_s` while they started; names those at fault."""
        all_said_hello = len(self._hellos) == len(self._configs) or len(self._configs) == 1
        names = self._others(self._readies if all_said_hello else self._hellos)
        return WorkerLost(f"{names} made no progress for {timeout_s:g} s while starting")

    def _others(self, ranks: Container[int]) -> str:
        """Names of the workers that are not in `ranks`."""
        others = (config for rank, config in enumerate(self._configs) if rank not in ranks)
        return ", ".join(map(worker_name, others))

    def failure(self, rank: int, message: WorkerFailed) -> WorkerLost:
        if len(self._configs) == 1:
            return WorkerLost(message.error, message.is_user_error)
        name = worker_name(self._configs[rank])
        return WorkerLost(f"{name}: {message.error}", message.is_user_error)

    def close(self) -> None:
        self.workers.close()
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()
        self._context.term()


def _connections(identities: list[bytes], message_type: object) -> dict[bytes, tuple[int, _Decode]]:
    decode: _Decode = Codec[WorkerMessage | TransferMessage](message_type).decode
    return {identity: (rank, decode) for rank, identity in enumerate(identities)}
