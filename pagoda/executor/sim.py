"""Workers that only exist as a cost model: no weights, no torch, real or virtual time.

The simulated worker keeps slots exactly as a real one does, and its "model" is a hash of seed, position and
the previous token, so an answer depends on nothing but the request. With `check_kv` it also remembers which
token of which sequence was last written to every cell of the KV cache, and refuses to read a cell that holds
anything else: a wrong block table shows up at once. With several stages it refuses to compute a token that the
first of them was not told of.
"""

from __future__ import annotations

from collections import deque

from pagoda.engine.messages import (
    Capabilities,
    SimConfig,
    SlotStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WorkerReady,
)
from pagoda.executor.base import ExecutorEvent, max_in_flight
from pagoda.ipc.clock import Clock

_MASK = 2**64 - 1


def sim_token(seed: int, position: int, previous_token_id: int, vocab_size: int) -> int:
    """The token that the simulated model samples behind `previous_token_id`; SplitMix64 (Steele et al. 2014)."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + previous_token_id) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) % vocab_size


class SimExecutor:
    """Answers every plan after the time that the cost model gives it, which all stages share evenly."""

    def __init__(
        self, config: SimConfig, *, clock: Clock, check_kv: bool = False, num_stages: int = 1
    ) -> None:
        self._config = config
        self._clock = clock
        self._check_kv = check_kv
        self._events: deque[tuple[float, ExecutorEvent]] = deque()
        self._busy_until = [0.0] * num_stages
        """By stage."""
        self._worker = SimWorker(config, check_kv=check_kv, num_stages=num_stages)
        self.max_in_flight = max_in_flight(num_stages)

    def start(self, num_blocks: int | None = None) -> None:
        config = self._config
        num_stages = len(self._busy_until)
        self._worker = SimWorker(config, check_kv=self._check_kv, num_stages=num_stages)
        self._busy_until = [self._clock.now()] * num_stages
        self._events.clear()
        ready = WorkerReady(
            capabilities=Capabilities(
                block_sizes=(config.block_size,),
                max_batch_tokens=2**31 - 1,
                max_batch_seqs=2**31 - 1,
                max_model_len=config.max_model_len,
            ),
            num_blocks=num_blocks or config.num_blocks,
            block_size=config.block_size,
            max_model_len=min(config.max_model_len, config.num_blocks * config.block_size),
            vocab_size=config.vocab_size,
            summary="simulated worker",
            arithmetic="simulated",
        )
        self._events.append((self._clock.now(), ready))

    def submit(self, plan: StepPlan) -> None:
        cost = self._config.base_s + self._config.per_token_s * sum(plan.num_tokens)
        done = self._clock.now()
        for stage, busy_until in enumerate(self._busy_until):
            done = max(busy_until, done) + cost / len(self._busy_until)
            self._busy_until[stage] = done
        self._events.append((done, self._worker.execute(plan, cost)))

    def poll(self) -> list[ExecutorEvent]:
        now = self._clock.now()
        due: list[ExecutorEvent] = []
        while self._events and self._events[0][0] <= now:
            due.append(self._events.popleft()[1])
        return due

    def pollables(self) -> list[object]:
        return []

    def next_event_at(self) -> float | None:
        return self._events[0][0] if self._events else None

    def close(self) -> None:
        self._events.clear()


class SimWorker:
    """The slots of a worker, without the arithmetic."""

    def __init__(self, config: SimConfig, *, check_kv: bool, num_stages: int = 1) -> None:
        self._config = config
        self._num_stages = num_stages
        self._slots: dict[int, _Slot] = {}
        self._cells: dict[tuple[int, int], tuple[int, ...]] | None = {} if check_kv else None
        """(block id, offset) -> the tokens of the sequence up to and including that cell."""

    def execute(self, plan: StepPlan, cost_s: float) -> StepResult:
        for slot_id in plan.freed_slots:
            del self._slots[slot_id]
        for start in plan.starts:
            if start.slot in self._slots:
                raise ValueError(f"Slot {start.slot} is started while it is in use.")
            self._slots[start.slot] = _Slot(start)
        for slot_id, block_ids in plan.new_blocks:
            self._slots[slot_id].block_ids.extend(block_ids)
        for slot_id, token_id in plan.appended:
            self._slots[slot_id].tell(token_id)
        for slot_id, count in zip(plan.slots, plan.num_tokens, strict=True):
            slot = self._slots[slot_id]
            if self._num_stages > 1 and slot.num_computed_tokens + count > slot.num_told_tokens:
                raise ValueError(
                    f"Slot {slot_id} is to compute a token that the first stage does not know."
                )
            if self._cells is not None:
                self._write(slot, count, self._cells)
            slot.num_computed_tokens += count
        sampled, token_ids = [], []
        logprobs: dict[int, TokenLogprobs] = {}
        for slot_id in plan.slots:
            slot = self._slots[slot_id]
            if self._cells is not None:
                self._read(slot_id, slot, self._cells)
            if slot.num_computed_tokens == len(slot.token_ids):
                token_id = slot.sample(self._config.vocab_size)
                sampled.append(slot_id)
                token_ids.append(token_id)
                if slot.sampling.logprobs is not None:
                    top = slot.sampling.logprobs
                    logprobs[slot_id] = TokenLogprobs(
                        0.0, 1, [token_id] * min(top, 1), [0.0] * min(top, 1)
                    )
        return StepResult(plan.step, sampled, token_ids, logprobs, step_time_s=cost_s)

    def _write(
        self, slot: _Slot, count: int, cells: dict[tuple[int, int], tuple[int, ...]]
    ) -> None:
        for position in range(slot.num_computed_tokens, slot.num_computed_tokens + count):
            cells[self._cell(slot, position)] = tuple(slot.token_ids[: position + 1])

    def _read(
        self, slot_id: int, slot: _Slot, cells: dict[tuple[int, int], tuple[int, ...]]
    ) -> None:
        for position in range(slot.num_computed_tokens):
            if cells.get(self._cell(slot, position)) != tuple(slot.token_ids[: position + 1]):
                raise ValueError(
                    f"Slot {slot_id} would read another sequence's KV at position {position}."
                )

    def _cell(self, slot: _Slot, position: int) -> tuple[int, int]:
        block_index, offset = divmod(position, self._config.block_size)
        return slot.block_ids[block_index], offset


class _Slot:
    def __init__(self, start: SlotStart) -> None:
        self.token_ids = list(start.token_ids)
        self.block_ids = list(start.block_ids)
        self.sampling = start.sampling
        self.num_computed_tokens = start.num_computed_tokens
        self.num_prompt_tokens = start.num_prompt_tokens
        self.num_told_tokens = len(start.token_ids)
        """What the stages know that do not sample."""
        self._eos_token_ids = {*start.eos_token_ids, *start.sampling.stop_token_ids}

    def tell(self, token_id: int) -> None:
        if self.token_ids[self.num_told_tokens : self.num_told_tokens + 1] != [token_id]:
            raise ValueError(f"Token {token_id} was not what the last stage sampled.")
        self.num_told_tokens += 1

    def sample(self, vocab_size: int) -> int:
        position = len(self.token_ids) - self.num_prompt_tokens
        previous = self.token_ids[-1]
        token_id = sim_token(self.sampling.seed or 0, position, previous, vocab_size)
        while position < self.sampling.min_tokens and token_id in self._eos_token_ids:
            token_id = (token_id + 1) % vocab_size
        self.token_ids.append(token_id)
        return token_id
