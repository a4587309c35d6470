# SPDX-License-Identifier: Apache-2.0
"""Checks of whole models through a worker's runner and its tickets: pagoda-tiny, and small ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pagoda.backend.base import UnsupportedError
from pagoda.backend.overlap import OverlapBackend
from pagoda.checkpoints.resolve import EMBEDDED_MODEL, resolve_model
from pagoda.devices import DeviceSet
from pagoda.errors import ConfigError
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import NewBlocks, SlotStart, StepPlan, StepResult
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.plugins.backend_check.small_models import WITH_EXPERTS, WITH_STATES, model_directory
from pagoda.plugins.backend_check.subject import Check, FailedError, LackingError, Subject, ensure
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.input_batch import MAX_STEPS
from pagoda.worker.loading import load_runner, plan_worker
from pagoda.worker.runner import Runner, Ticket

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=24, logprobs=3)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=24, logprobs=3)
NUM_TOKENS = 12
"""Tokens of each answer."""
PROMPTS = tuple(
    tuple((7 * place + 31 * number) % 900 for place in range(length))
    for number, length in enumerate((5, 40, 1, 19))
)
_NUM_BLOCKS = 96


@dataclass
class _Answers:
    """Tokens that slots sampled, and the log-probability of each."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    expert_tokens: list[list[int]] = field(default_factory=list, compare=False)
    """Tokens that went to each expert, step by step."""
    num_ahead: int = field(default=0, compare=False)
    """Steps that were launched before the results of those in front of them were read."""

    def add(self, result: StepResult) -> None:
        ensure(not result.errors, f"a step fails: {result.errors}")
        for slot, tokens in zip(result.slots, result.token_ids, strict=True):
            self.tokens.setdefault(slot, []).extend(tokens)
            reports = result.logprobs[slot]
            self.logprobs.setdefault(slot, []).extend(report.logprob for report in reports)
        self.expert_tokens.append(result.expert_tokens)


class _PlanByHand:
    """Makes plans by hand, and submits each, and launches it, before the results of those before it are taken."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._block_sizes = runner.batch.block_sizes
        self._step = 0
        self._next_block = 0
        self._tickets: deque[Ticket[StepResult]] = deque()
        self._computed: dict[int, int] = {}
        self._held: dict[int, list[int]] = {}
        """Blocks of each KV group, by slot."""
        self._starts: list[SlotStart] = []
        self.answers = _Answers()

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._computed[slot], self._held[slot] = 0, [0] * len(self._block_sizes)
        tables: list[list[int]] = [[] for _ in self._block_sizes]
        self._starts.append(SlotStart(slot, list(prompt), len(prompt), 0, tables, Work(sampling)))

    def submit(self, shares: dict[int, int]) -> None:
        """Submits a step of so many tokens of slots."""
        new: list[NewBlocks] = []
        for slot, count in shares.items():
            self._computed[slot] += count
            for group, size in enumerate(self._block_sizes):
                needed = -(-self._computed[slot] // size) - self._held[slot][group]
                if needed:
                    # From the end of the pool, so that a sequence's blocks are not in order.
                    first = _NUM_BLOCKS - self._next_block - needed
                    new.append(NewBlocks(slot, group, list(range(first, first + needed))))
                    self._next_block += needed
                    self._held[slot][group] += needed
        plan = StepPlan(self._step, [*shares], [*shares.values()], self._starts, new)
        self._starts = []
        self._step += 1
        self._tickets.append(self._runner.submit(plan))
        is_launched = self._tickets[-1].launch() is not None
        self.answers.num_ahead += is_launched and len(self._tickets) > 1
        if len(self._tickets) == MAX_STEPS:
            self._take()

    def _take(self) -> None:
        self.answers.add(self._tickets.popleft().result())

    def finish(self) -> _Answers:
        while self._tickets:
            self._take()
        return self.answers


@dataclass(frozen=True)
class _Place:
    """A backend by name, and the devices of its one rank; the first one where none are named."""

    backend: str
    devices: tuple[str, ...] = ()
    directory: str = ""
    """Directory of a model with dummy weights; empty for the embedded model."""


def _load(place: _Place, dtype: str) -> Runner:
    loaded = load_runner(plan_worker(_config(place, dtype)), Tracer("backend check"))
    if not isinstance(loaded.runner, Runner):
        raise TypeError("A worker that is alone has all stages.")
    return loaded.runner


def _config(place: _Place, dtype: str) -> WorkerConfig:
    """The model of a place."""
    return WorkerConfig(
        model=place.directory or resolve_model(EMBEDDED_MODEL).model,
        load_format="dummy" if place.directory else "auto",
        backend=place.backend,
        parallel=ParallelConfig(devices=place.devices),
        dtype=dtype,
        num_blocks=_NUM_BLOCKS,
        max_num_seqs=8,
        max_model_len=128,
    )


def together(place: _Place, dtype: str, sampling: SamplingParams) -> _Answers:
    """All prompts in one step, then a token of each in every step, with two steps under way."""
    engine = _PlanByHand(_load(place, dtype))
    for slot, prompt in enumerate(PROMPTS):
        engine.start(slot, prompt, sampling)
    engine.submit({slot: len(prompt) for slot, prompt in enumerate(PROMPTS)})
    for _ in range(NUM_TOKENS - 1):
        engine.submit(dict.fromkeys(range(len(PROMPTS)), 1))
    return engine.finish()


def in_pieces(place: _Place, dtype: str, sampling: SamplingParams) -> _Answers:
    """Each prompt seven tokens at a time, in the company of answers that run already."""
    engine = _PlanByHand(_load(place, dtype))
    running: dict[int, int] = {}
    for slot, prompt in enumerate(PROMPTS):
        engine.start(slot, prompt, sampling)
        for done in range(0, len(prompt), 7):
            own = {slot: min(7, len(prompt) - done)}
            engine.submit({other: 1 for other, left in running.items() if left} | own)
            for other, left in running.items():
                running[other] = max(0, left - 1)
        running[slot] = NUM_TOKENS - 1
    while any(running.values()):
        engine.submit({slot: 1 for slot, left in running.items() if left})
        running = {slot: max(0, left - 1) for slot, left in running.items()}
    return engine.finish()


def _memory(subject: Subject) -> str:
    """The device's memory is free before a model is loaded, and holds its weights behind that."""
    if subject.backend.memory.on_host:
        return "it is the host's, of which others take too"
    place = _Place(subject.name)
    plan = plan_worker(_config(place, _dense(subject)[0]))
    memory = plan.backend.memory
    free, before = memory.free_bytes(), memory.taken_bytes()
    runner = load_runner(plan, Tracer("backend check"))
    taken = memory.taken_bytes() - before
    ensure(
        taken >= plan.weight_bytes * 3 // 4,
        f"memory.taken_bytes() grows by {taken} with a model of {plan.weight_bytes} bytes",
    )
    ensure(
        memory.free_bytes() <= free - plan.weight_bytes * 3 // 4,
        f"memory.free_bytes() is {memory.free_bytes()} behind a model, and was {free} before",
    )
    del runner  # the model, which was there until now
    return f"{free >> 20} MiB free, {taken >> 20} taken for weights of {plan.weight_bytes >> 20}"


def _dense(subject: Subject) -> list[str]:
    known = subject.backend.capabilities.weight_formats
    return [name for name in ("float32", "bfloat16", "float16") if name in known]


def _answers(subject: Subject, devices: tuple[str, ...] = ()) -> str:
    """The embedded model's answers are those of the reference in float32."""
    return _checked_answers(subject, _Place(subject.name, devices))


def _small_answers(config: Mapping[str, object], subject: Subject) -> str:
    """The same of a small model."""
    with model_directory(config) as directory:
        return _checked_answers(subject, _Place(subject.name, directory=directory))


def _checked_answers(subject: Subject, place: _Place) -> str:
    if "float32" not in _dense(subject):
        raise LackingError("its capabilities have no weights of float32")
    places = (place, replace(place, backend="reference", devices=()))
    own, expected = (_served(each, "float32") for each in places)
    for slot, tokens in expected.tokens.items():
        ensure(
            own.tokens.get(slot) == tokens,
            f"prompt {slot} is answered with {own.tokens.get(slot)}, not {tokens}",
        )
        worst = max(
            abs(a - b) for a, b in zip(own.logprobs[slot], expected.logprobs[slot], strict=True)
        )
        ensure(worst < 1e-3, f"log-probabilities of prompt {slot} differ by {worst:.2g}")
    ensure(
        own.expert_tokens == expected.expert_tokens,
        f"experts are given {own.expert_tokens} tokens in the steps, not {expected.expert_tokens}",
    )
    overlaps = isinstance(subject.backend, OverlapBackend)
    ensure(
        own.num_ahead == (NUM_TOKENS - 1 if overlaps else 0),
        f"{own.num_ahead} of {NUM_TOKENS - 1} steps are launched before the results in front of them are read",
    )
    way = "launched ahead" if overlaps else "two steps under way"
    return f"{len(expected.tokens)} prompts, {NUM_TOKENS} tokens each, {way}"


def _served(place: _Place, dtype: str) -> _Answers:
    try:
        return together(place, dtype, GREEDY)
    except UnsupportedError as error:
        raise LackingError(str(error).removesuffix(".")) from None


def _company(subject: Subject, devices: tuple[str, ...] = ()) -> str:
    """Answers have the same bits whatever else is in a step, and however prompts are cut."""
    checked: list[str] = []
    place = _Place(subject.name, devices)
    for dtype in _dense(subject):
        if dtype not in subject.backend.capabilities.kv_cache_dtypes:
            continue
        for sampling in (GREEDY, DRAWN) if not checked else (DRAWN,):
            try:
                both: list[Any] = [way(place, dtype, sampling) for way in (together, in_pieces)]
            except UnsupportedError as error:
                raise LackingError(str(error).removesuffix(".")) from None
            if both[0] != both[1]:
                raise FailedError(f"answers in {dtype} change with the company of a step")
        checked.append(dtype)
    return f"{', '.join(checked)}: prompts at once and in pieces of 7, greedy and drawn"


def _two_devices(subject: Subject) -> str:
    """Answers are the same where the rank drives two devices; a backend may say that one is all that it drives."""
    if subject.entry.max_devices == 1:
        return "a rank drives one device"
    devices = (str(DeviceSet(subject.entry.device_kind, (0, 1))),)
    try:
        return f"{_answers(subject, devices)}; {_company(subject, devices)}"
    except ConfigError as error:  # this machine has one device
        raise LackingError(str(error).removesuffix(".")) from None


FURTHER = (
    Check("pagoda-tiny, answers", _answers),
    Check("a model with states, answers", partial(_small_answers, WITH_STATES)),
    Check("a model with experts, answers", partial(_small_answers, WITH_EXPERTS)),
    Check("pagoda-tiny, any company", _company),
    Check("pagoda-tiny, memory of the device", _memory),
    Check("pagoda-tiny, two devices of a rank", _two_devices),
)
