# SPDX-License-Identifier: Apache-2.0
"""Workers that only exist as a cost model: no weights, no torch, real or virtual time.

The simulated worker keeps slots as a real one does, and its "model" is a hash of seed, position and the previous
token, so an answer depends on nothing but the request; where a grammar leaves no such token, the next one in the
vocabulary is taken that it does leave. That token is the likeliest, and those behind it in the vocabulary follow.
With `check_kv` it remembers which sequence was last written to every cell of the KV cache, and refuses to read a
cell that holds anything else. With several stages it refuses to compute a token that the first of them was not
told of.

Transfers copy such cells to and from a host arena and a disk, which outlives the worker. Nobody else may write to
what they read, or touch what they write to; steps neither, unless the transfer waits for them. Cells of another
engine in this process are read as they are when the transfer ends; of one in another process, nothing is copied.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from itertools import chain
from itertools import count as count_from
from operator import or_
from typing import Any, NamedTuple

from pagoda.executor.base import ExecutorEvent, max_in_flight
from pagoda.ipc.clock import Clock
from pagoda.messages.adapters import Adapter, AdapterLoaded
from pagoda.messages.engine_config import SimConfig
from pagoda.messages.frontend import PromptLogprobs, TokenLogprobs
from pagoda.messages.kv_groups import KVKind, full_group
from pagoda.messages.tracing import TraceStopped
from pagoda.messages.transfers import (
    DeviceBlocks,
    HostSlots,
    KVPeer,
    KVRank,
    RemoteBlocks,
    TierBlocks,
    Transfer,
    TransferEnd,
    TransferPlace,
    Transfers,
    num_places,
)
from pagoda.messages.worker import (
    Capabilities,
    LostSegments,
    StepPlan,
    StepResult,
    TokenMasks,
    WorkerReady,
)
from pagoda.plugins.sim.costs import step_time_s
from pagoda.plugins.sim.drafting import num_unkept, propose, say
from pagoda.plugins.sim.model import sim_embedding, token_logprobs
from pagoda.plugins.sim.slots import Place, SimSlot
from pagoda.telemetry.tracer import TraceSession

Cells = dict[int, tuple[int, ...]]
"""A block: offset -> the tokens of the sequence up to and including that cell."""


class TransferFate(NamedTuple):
    """Faults of one transfer, beyond the cost model."""

    delay_s: float = 0.0
    failed: tuple[int, ...] = ()


SimNeighbours = dict[bytes, "SimWorker"]
"""The workers of all simulated engines of one process, by name; each may read the KV of the others."""
_NEIGHBOUR = "sim"
"""The transport between simulated workers of one process."""
_numbers = count_from()


class SimExecutor:
    """Answers every plan after the time that the cost model gives it, which all stages share evenly."""

    def __init__(
        self,
        config: SimConfig,
        *,
        clock: Clock,
        check_kv: bool = False,
        num_stages: int = 1,
        transfer_fate: Callable[[Transfer], TransferFate] = lambda _: TransferFate(),
        disk: dict[bytes, Cells] | None = None,
        disk_hangs: Callable[[], bool] = lambda: False,
        neighbours: SimNeighbours | None = None,
    ) -> None:
        """`check_kv` finds broken block tables; `disk` holds objects that are there already. While `disk_hangs`,
        steps wait for it in vain.

        `neighbours` are where KV of other engines is copied from; None copies nothing.
        """
        self._config = config
        self._clock = clock
        self._check_kv = check_kv
        self._transfer_fate = transfer_fate
        self._events: list[tuple[float, int, ExecutorEvent | tuple[Transfer, TransferFate]]] = []
        """A heap, by time; among equals in the order in which they were foreseen. A transfer is copied then."""
        self._order = count_from()
        self._steps: deque[tuple[float, int]] = deque()
        """Steps under way, and when they will have been executed."""
        self._plans: deque[tuple[float, StepPlan, float]] = deque()
        """Steps that await masks, or come behind such a step: when they end, plans and costs."""
        self._cold: Counter[int] = Counter()
        """Cold blocks by slot."""
        self._executed_step = -1
        self._busy_until = [0.0] * num_stages
        self._link_free_at = 0.0
        """Instant at which the last transfer so far will have ended."""
        self._disk = {} if disk is None else disk
        self._disk_hangs = disk_hangs
        self._neighbours = neighbours
        self._loaded: list[ExecutorEvent] = []
        """Adapters that were loaded, which outlive workers."""
        self._name = b""
        self._peers: dict[str, KVPeer] = {}
        self.worker: SimWorker
        self.max_in_flight = max_in_flight(num_stages)

    def start(self, num_blocks: int | None = None) -> None:
        config, num_stages = self._config, len(self._busy_until)
        self.worker = SimWorker(
            config,
            check_kv=self._check_kv,
            num_stages=num_stages,
            disk=self._disk,
            disk_hangs=self._disk_hangs,
        )
        self._executed_step = -1
        self._busy_until = [self._clock.now()] * num_stages
        self.close()
        num_blocks = num_blocks or config.num_blocks
        descriptors = {}
        if self._neighbours is not None:
            self._name = b"%d" % next(_numbers)
            self._neighbours[self._name] = self.worker
            descriptors = {_NEIGHBOUR: self._name}
        ready = WorkerReady(
            max_proposals=config.max_proposals,
            capabilities=Capabilities(
                block_sizes=(config.block_size,),
                max_batch_tokens=2**31 - 1,
                max_batch_seqs=2**31 - 1,
                max_model_len=config.max_model_len,
            ),
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=(
                config.max_model_len
                if config.kv_groups or config.segment_tokens
                else min(config.max_model_len, config.num_blocks * config.block_size)
            ),
            kv_groups=config.kv_groups,
            vocab_size=config.vocab_size,
            hidden_size=1,  # its answers do not depend on embeddings that are given
            summary="simulated worker",
            arithmetic="simulated",
            kv_host_slots=config.kv_host_slots,
            segment_tokens=config.segment_tokens,
            kv_places=config.kv_places,
            kv_ranks=(KVRank(parts=(), num_blocks=num_blocks, descriptors=descriptors),),
            kv_digest=f"simulated, {config.block_size} tokens of {config.vocab_size}",
        )
        self._foresee(self._clock.now(), ready)

    def submit(self, plan: StepPlan) -> None:
        cost = step_time_s(self._config, plan, self.worker.slots)
        cost += self._config.per_cold_block_s * self._count_cold(plan)
        done = self._clock.now()
        for stage, busy_until in enumerate(self._busy_until):
            done = max(busy_until, done) + cost / len(self._busy_until)
            self._busy_until[stage] = done
        self._forget_executed_steps()
        self._steps.append((done, plan.step))
        self._plans.append((done, plan, cost))
        self._execute()

    def submit_done(self, plan: StepPlan, cost_s: float) -> None:
        """Takes a step that has just ended; no other is under way."""
        self._forget_executed_steps()
        self._steps.append((self._clock.now(), plan.step))
        self._foresee(self._clock.now(), self.worker.execute(plan, cost_s))

    def _count_cold(self, plan: StepPlan) -> int:
        """Cold blocks that the plan reads."""
        for slot in plan.freed_slots:
            self._cold.pop(slot, None)
        for part in (*chain.from_iterable(start.cold for start in plan.starts), *plan.cold):
            self._cold[part.slot] += num_places(part.place)
        return sum(self._cold[slot] for slot in plan.slots)

    def submit_masks(self, masks: TokenMasks) -> None:
        self.worker.take_masks(masks)
        self._execute()

    def _execute(self) -> None:
        """Executes plans in order, until one awaits its masks."""
        while self._plans and self.worker.has_masks_for(self._plans[0][1]):
            done, plan, cost = self._plans.popleft()
            now = self._clock.now()
            if done < now:  # the masks came late
                late = ((max(at, now) if it == plan.step else at, it) for at, it in self._steps)
                self._steps = deque(late)
            self._foresee(max(done, now), self.worker.execute(plan, cost))

    def submit_transfers(self, message: Transfers) -> None:
        self._forget_executed_steps()
        self._peers |= {peer.peer_id: peer for peer in message.added_peers}
        for transfer in message.transfers:
            num_blocks = self.worker.begin(transfer)
            begins = self._executed_at(transfer.after_step)
            fate = self._transfer_fate(transfer)
            if self._config.shares_link:
                begins = max(begins, self._link_free_at)
            ends = begins + self._config.per_transferred_block_s * num_blocks + fate.delay_s
            self._link_free_at = ends
            self._foresee(ends, (transfer, fate))
        for peer_id in message.removed_peers:
            del self._peers[peer_id]

    def load_adapter(self, adapter: Adapter) -> None:
        self._loaded.append(AdapterLoaded(adapter.digest))

    def unload_adapter(self, digest: str) -> None:
        """A cost model has no adapters to forget."""

    def start_trace(self, session: TraceSession) -> None:
        """There is no process that could trace."""

    def stop_trace(self) -> None:
        self._foresee(self._clock.now(), TraceStopped())

    def _executed_at(self, step: int) -> float:
        """Time at which the worker will have executed all steps up to `step`.

        Raises ValueError if the worker was not given such a step.
        """
        if step <= self._executed_step:
            return self._clock.now()
        for done, under_way in self._steps:
            if under_way >= step:
                return done
        raise ValueError(f"A transfer would wait for step {step} for ever.")

    def _foresee(
        self, instant: float, event: ExecutorEvent | tuple[Transfer, TransferFate]
    ) -> None:
        heapq.heappush(self._events, (instant, next(self._order), event))

    def _forget_executed_steps(self) -> None:
        waiting = self._plans[0][1].step if self._plans else math.inf
        while (
            self._steps and self._steps[0][0] <= self._clock.now() and self._steps[0][1] < waiting
        ):
            _, self._executed_step = self._steps.popleft()
            self.worker.step_done(self._executed_step)

    def poll(self) -> list[ExecutorEvent]:
        now = self._clock.now()
        due, self._loaded = self._loaded, []
        while self._events and self._events[0][0] <= now:
            _, _, event = heapq.heappop(self._events)
            due.append(self._end(*event) if isinstance(event, tuple) else event)
        return due

    def _end(self, transfer: Transfer, fate: TransferFate) -> TransferEnd:
        source = transfer.source
        if not isinstance(source, RemoteBlocks):
            return self.worker.end(transfer, fate.failed)
        peer = self._peers.get(source.peer_id)
        if peer is not None and self._neighbours is None:
            return self.worker.end(transfer, fate.failed)
        name = b"" if peer is None else peer.ranks[0].descriptors[_NEIGHBOUR]
        neighbour = (self._neighbours or {}).get(name)
        if neighbour is None:
            return self.worker.end(transfer, tuple(range(len(source.block_ids))))
        return self.worker.end(transfer, fate.failed, neighbour.memory["device"])

    def pollables(self) -> list[object]:
        return []

    def pids(self) -> dict[str, int]:
        return {}

    def next_event_at(self) -> float | None:
        if self._loaded:
            return self._clock.now()
        return self._events[0][0] if self._events else None

    def close(self) -> None:
        self._events.clear()
        self._steps.clear()
        self._plans.clear()
        self._cold.clear()
        self._peers.clear()
        if self._neighbours is not None:
            self._neighbours.pop(self._name, None)


class SimWorker:
    """The slots and the memory of a worker, without the arithmetic."""

    def __init__(
        self,
        config: SimConfig,
        *,
        check_kv: bool,
        num_stages: int = 1,
        disk: dict[bytes, Cells] | None = None,
        disk_hangs: Callable[[], bool] = lambda: False,
    ) -> None:
        """`disk` holds objects that workers before it have written, and will hold what this one writes."""
        self._config = config
        self._groups = config.kv_groups or (full_group(0, config.block_size),)
        self._keeps_states = any(group.kind is KVKind.STATE for group in self._groups)
        self._num_stages = num_stages
        self._check_kv = check_kv
        self.slots: dict[int, SimSlot] = {}
        self.memory: dict[str, dict[Any, Cells]] = {
            "device": {},
            "host": {},
            "disk": {} if disk is None else disk,
        }
        """Blocks by the two parts of their places."""
        self._disk_hangs = disk_hangs
        self._step_writes: defaultdict[int, set[Place]] = defaultdict(set)
        self._step_reads: defaultdict[int, set[Place]] = defaultdict(set)
        """Places that each step under way uses."""
        self._masks: dict[int, TokenMasks] = {}
        """Masks of steps that have not been executed."""
        self._reading: Counter[Place] = Counter()
        self._writing: set[Place] = set()
        """Places that transfers use."""

    def take_masks(self, masks: TokenMasks) -> None:
        """Raises ValueError if the step has masks already."""
        if masks.step in self._masks:
            raise ValueError(f"Step {masks.step} was given masks twice.")
        self._masks[masks.step] = masks

    def has_masks_for(self, plan: StepPlan) -> bool:
        return not plan.masked_slots or plan.step in self._masks

    def execute(self, plan: StepPlan, cost_s: float) -> StepResult:
        for slot_id in plan.freed_slots:
            del self.slots[slot_id]
        for start in plan.starts:
            if start.slot in self.slots:
                raise ValueError(f"Slot {start.slot} is started while it is in use.")
            self.slots[start.slot] = SimSlot(start, by_seed=self._config.answers_by_seed)
        for new in plan.new_blocks:
            self.slots[new.slot].block_ids[new.group].extend(new.block_ids)
        for part in (*chain.from_iterable(start.cold for start in plan.starts), *plan.cold):
            self.slots[part.slot].cold[part.group] += _places(part.place)
        for slot_id, token_id in plan.new_tokens:
            self.slots[slot_id].tell(token_id)
        for slot_id, forced in plan.forced_tokens:
            self.slots[slot_id].append_forced(forced)
        for slot_id, draft in plan.drafts:
            self.slots[slot_id].take_draft(draft)
        masks = self._masks.pop(plan.step, TokenMasks(plan.step))
        asked, proposals = dict(plan.proposals), dict[int, list[int]]()
        prompt_logprobs: dict[int, PromptLogprobs] = {}
        embeddings: dict[int, bytes] = {}
        lost = {it: found for it in plan.slots if (found := self._lost_of(it)) is not None}
        num_cold_blocks = 0
        for slot_id, count in zip(plan.slots, plan.num_tokens, strict=True):
            slot = self.slots[slot_id]
            num_told = slot.num_told_tokens + len(slot.draft)
            if self._num_stages > 1 and slot.num_computed_tokens + count > num_told:
                raise ValueError(
                    f"Slot {slot_id} is to compute a token that the first stage does not know."
                )
            if self._check_kv:
                self._write(plan.step, slot, count)
            scores = slot.scores(count, self._config.vocab_size)
            if scores is not None:
                prompt_logprobs[slot_id] = scores
            slot.num_computed_tokens += count
        sampled: list[int] = []
        token_ids: list[list[int]] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for slot_id, count in zip(plan.slots, plan.num_tokens, strict=True):
            slot = self.slots[slot_id]
            num_cold_blocks += sum(map(len, slot.cold.values()))
            if slot_id in lost:
                continue
            if self._check_kv:
                self._read(plan.step, slot, count)
            if slot.num_computed_tokens == len(slot.token_ids):
                if slot.pooling is not None:
                    embeddings[slot_id] = sim_embedding(slot.token_ids)
                if slot.sampling.max_tokens == 0:
                    continue
                vocab_size, certain = self._config.vocab_size, masks.tokens.get(slot_id)
                wanted = [masks.masks.get(slot_id), *masks.draft_masks.get(slot_id, [])]
                if slot_id not in plan.masked_slots:
                    wanted += [None] * len(slot.draft)
                said = say(slot, vocab_size, wanted, certain, keeps_states=self._keeps_states)
                sampled.append(slot_id)
                token_ids.append(said)
                if slot_id in asked:
                    proposals[slot_id] = propose(slot, self._config, asked[slot_id])
                if (num_top := slot.sampling.logprobs) is not None:
                    logprobs[slot_id] = [token_logprobs(it, num_top, vocab_size) for it in said]
        return StepResult(
            plan.step,
            sampled,
            token_ids,
            logprobs,
            prompt_logprobs,
            embeddings,
            proposals=proposals,
            step_time_s=cost_s,
            streamed_bytes=num_cold_blocks,
            stream_time_s=num_cold_blocks * self._config.per_cold_block_s,
            lost_segments=lost,
        )

    def _lost_of(self, slot_id: int) -> LostSegments | None:
        """Cold segments of the slot that cannot be read, now or before."""
        slot = self.slots[slot_id]
        for group, places in slot.cold.items() if slot.lost is None else ():
            count = self._config.segment_tokens // self._groups[group].block_size
            hangs = [kind == "disk" and self._disk_hangs() for kind, _ in places]
            gone = [key not in self.memory[kind] for kind, key in places]
            bad = [index for index, it in enumerate(map(or_, hangs, gone)) if it]
            if bad:
                reason = "it has not answered" if hangs[bad[0]] else "an object has gone"
                lost = LostSegments(reason, bad[0] // count, hangs=hangs[bad[0]])
                slot.lost = lost if slot.lost is None else slot.lost.joined(lost)
        return slot.lost

    def step_done(self, step: int) -> None:
        """The step has been executed; until then transfers keep away from what it uses."""
        self._step_writes.pop(step, None)
        self._step_reads.pop(step, None)

    def _write(self, step: int, slot: SimSlot, count: int) -> None:
        start = slot.num_computed_tokens
        for group, it in enumerate(self._groups):
            if it.kind is KVKind.STATE and start:
                self._expect(slot, group, start - 1)
            for position in range(start, start + count - num_unkept(slot, it)):
                place, offset = self._cell(slot, group, position)
                if place in self._writing or self._reading[place] or place[0] != "device":
                    raise ValueError(
                        f"Step {step} writes to block {place[1]!r}, which is under transfer."
                    )
                self._step_writes[step].add(place)
                cells = self.memory["device"].setdefault(place[1], {})
                cells[offset] = _content(slot, group, position)

    def _read(self, step: int, slot: SimSlot, count: int) -> None:
        """Looks at all that the last `count` tokens of a slot have read."""
        start, end = slot.num_computed_tokens - count, slot.num_computed_tokens
        for group, it in enumerate(self._groups):
            first = it.first_token(start)
            for index in range(first // it.block_size, it.num_blocks_for(end)):
                place = slot.place(group, index)
                self._step_reads[step].add(place)
                if place in self._writing:
                    raise ValueError(
                        f"Step {step} reads block {place[1]!r}, which is under transfer."
                    )
            kept_end = end - num_unkept(slot, it)
            for position in range(first, kept_end):
                is_overwritten = position + 1 < kept_end and (position + 1) % it.block_size
                if it.kind is not KVKind.STATE or not is_overwritten:
                    self._expect(slot, group, position)

    def _expect(self, slot: SimSlot, group: int, position: int) -> None:
        (kind, block), offset = self._cell(slot, group, position)
        cells = self.memory[kind].get(block, {})
        if cells.get(offset) != _content(slot, group, position):
            raise ValueError(
                f"Slot {slot.slot} would read another sequence's KV at position {position}."
            )

    def _cell(self, slot: SimSlot, group: int, position: int) -> tuple[Place, int]:
        """A block and the place of a token in it; a state has one place, whatever the token."""
        it = self._groups[group]
        block_index, offset = divmod(position, it.block_size)
        return slot.place(group, block_index), 0 if it.kind is KVKind.STATE else offset

    # ---- transfers

    def begin(self, transfer: Transfer) -> int:
        """Returns how many blocks are copied.

        Raises ValueError if another transfer reads what this one writes, or writes what it reads.
        """
        sources, targets = _overwritten(transfer.source), _overwritten(transfer.target)
        for step, written in self._step_writes.items():
            touched = sources | targets if step > transfer.after_step else sources
            if not touched.isdisjoint(written):
                raise ValueError(f"{transfer} uses what step {step} writes to.")
        for step, read in self._step_reads.items():
            if step > transfer.after_step and not targets.isdisjoint(read):
                raise ValueError(f"{transfer} writes to what step {step} reads.")
        if any(self._reading[place] for place in targets):
            raise ValueError(f"{transfer} writes to what another transfer reads.")
        if not self._writing.isdisjoint(sources | targets):
            raise ValueError(f"{transfer} uses what another transfer writes to.")
        self._reading.update(sources)
        self._writing |= targets
        return len(_places(transfer.source))

    def end(
        self,
        transfer: Transfer,
        failed: tuple[int, ...] = (),
        remote: Mapping[Any, Cells] | None = None,
    ) -> TransferEnd:
        """Copies all but `failed`, of which the targets lose what they held.

        `remote` is the device of another engine, where the source is there.
        """
        self._reading.subtract(_overwritten(transfer.source))
        self._writing -= _overwritten(transfer.target)
        not_copied = []
        both = zip(_places(transfer.source), _places(transfer.target), strict=True)
        for index, ((kind, read), (target_kind, written)) in enumerate(both):
            cells = (remote or {}).get(read) if kind == "remote" else self.memory[kind].get(read)
            if index in failed or (cells is None and kind == "disk"):
                not_copied.append(index)
                self.memory[target_kind].pop(written, None)
            elif cells is None and self._check_kv and kind != "remote":
                raise ValueError(f"{transfer} reads {read!r}, where nothing is.")
            else:
                self.memory[target_kind][written] = dict(cells or {})
        error = "it was not to be" if not_copied else ""
        return TransferEnd(transfer.transfer_id, transfer.generation, not_copied, error)


def _content(slot: SimSlot, group: int, position: int) -> tuple[int, ...]:
    """Content of a group's cell behind a position of the sequence."""
    own = slot.token_ids[: position + 1]
    return (-group, *own) if group else tuple(own)


def _places(place: TransferPlace) -> list[Place]:
    match place:
        case DeviceBlocks(block_ids):
            return [("device", block_id) for block_id in block_ids]
        case HostSlots(slots):
            return [("host", slot) for slot in slots]
        case TierBlocks(_, keys):
            return [("disk", key) for key in keys]
        case RemoteBlocks(_, block_ids):
            return [("remote", block_id) for block_id in block_ids]


def _overwritten(place: TransferPlace) -> set[Place]:
    """Places that are overwritten bit by bit. Objects on disk are not: a new one replaces the old one at once."""
    return set() if isinstance(place, TierBlocks | RemoteBlocks) else set(_places(place))
