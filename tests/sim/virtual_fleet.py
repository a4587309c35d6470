# SPDX-License-Identifier: Apache-2.0
"""A fleet in virtual time: requests of clients, what they got, and engines that die."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from pagoda.errors import EngineDeadError, OverloadedError
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.placement import ReplicaSlot
from pagoda.fleet.policies import POLICIES, PolicyName
from pagoda.messages.engine_config import EngineConfig, SimConfig
from pagoda.messages.frontend import (
    FinishReason,
    FrontendMessage,
    GenerateRequest,
    TokenChunk,
    Work,
)
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import WorkerConfig
from pagoda.plugins.sim.model import sim_token
from pagoda.plugins.simulate.engine import SimEngine
from pagoda.plugins.simulate.event_loop import run

VOCAB_SIZE = 100
POISON = VOCAB_SIZE + 1
P = ParamSpec("P")
T = TypeVar("T")

_at_end: ContextVar[AsyncExitStack] = ContextVar("_at_end")


def virtual(
    test: Callable[P, Coroutine[Any, Any, T]], lateness_s: Callable[[], float] = lambda: 0.0
) -> Callable[P, T]:
    """Runs a test in virtual time, and then what the test asked for with `at_end`."""

    async def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        async with AsyncExitStack() as stack:
            _at_end.set(stack)
            return await test(*args, **kwargs)

    @wraps(test)
    def run_whole(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(whole(*args, **kwargs), lateness_s=lateness_s)

    return run_whole


def at_end(callback: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
    _at_end.get().push_async_callback(callback, *args)


def run_seeds(life: Callable[[int], Coroutine[Any, Any, T]], seeds: Sequence[int]) -> list[T]:
    """The results of lives with each seed; an error names its seed."""
    results = []
    for seed in seeds:
        try:
            results.append(virtual(life, lateness(seed))(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    return results


def engine_config(**fields: object) -> EngineConfig:
    """`fields` are those of `EngineConfig` and of `SimConfig`."""
    sim = {"base_s": 0.01, "per_token_s": 0.0002, "num_blocks": 64, "block_size": 4}
    sim |= {"max_model_len": 128, "vocab_size": VOCAB_SIZE}
    names = SimConfig.__struct_fields__
    sim |= {name: value for name, value in fields.items() if name in names}
    own = {"worker": WorkerConfig(model="sim"), "max_num_batched_tokens": 64, "max_num_seqs": 8}
    own |= {name: value for name, value in fields.items() if name not in names}
    return EngineConfig(executor="sim", sim=SimConfig(**sim), **own)  # type: ignore[arg-type]


def request(
    name: str, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 20, **fields: object
) -> GenerateRequest:
    """`fields` are those of `GenerateRequest` and of `Work`."""
    sampling = SamplingParams(seed=sum(name.encode()), max_tokens=max_tokens)
    work = {field: fields.pop(field) for field in Work.__struct_fields__ if field in fields}
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        work=Work(sampling, **work),  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )


def expected(asked: GenerateRequest) -> list[int]:
    tokens = [asked.prompt_token_ids[-1]]
    for position in range(asked.work.sampling.max_tokens or 0):
        tokens.append(sim_token(asked.work.sampling.seed or 0, position, tokens[-1], VOCAB_SIZE))
    return tokens[1:]


@dataclass
class Answer:
    """What a client got."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    refusal: Exception | None = None
    left: bool = False
    chunks: list[TokenChunk] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.finish is FinishReason.LENGTH and self.tokens == expected(self.request)


async def ask(
    dispatcher: Dispatcher, asked: GenerateRequest, *, leave_after: int | None = None
) -> Answer:
    answer = Answer(asked)
    try:
        async with aclosing(dispatcher.generate(asked)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                assert answer.finish is None, "a chunk behind the last one"
                assert chunk.is_news != bool(chunk.token_ids or chunk.finish_reason)
                if chunk.is_news:
                    continue
                answer.chunks.append(chunk)
                answer.tokens += chunk.token_ids
                answer.finish, answer.error = chunk.finish_reason, chunk.error
                if leave_after is not None and len(answer.tokens) >= leave_after:
                    answer.left = True
                    break
    except (OverloadedError, EngineDeadError) as error:
        answer.refusal = error
    return answer


def lateness(seed: int) -> Callable[[], float]:
    """Seconds that a loop wakes late: every other seed has a busy machine, where events meet in one turn."""
    rng = random.Random(seed)
    if seed % 2:
        return lambda: 0.0
    return lambda: rng.choice([0.0, 0.0, 0.0, 0.003, 0.03])


def poisoned(engine: SimEngine) -> SimEngine:
    """The engine, which from now on dies a little after it has taken a prompt with a `POISON` token."""
    return _after_poison(engine, lambda: engine.kill(restart_s=0.5))


def worker_breaking(engine: SimEngine) -> SimEngine:
    """The engine, whose workers die a little after they have had a prompt with a `POISON` token."""

    def fault() -> None:
        engine.lose_worker(restart_s=0.5)
        asyncio.get_running_loop().call_later(0.505, again)

    def again() -> None:
        if any(POISON in token_ids for token_ids in engine.running_tokens()):
            fault()

    return _after_poison(engine, fault)


def _after_poison(engine: SimEngine, fault: Callable[[], None]) -> SimEngine:
    take = engine.send

    def send(message: FrontendMessage) -> None:
        take(message)
        if isinstance(message, GenerateRequest) and POISON in message.prompt_token_ids:
            asyncio.get_running_loop().call_later(0.005, fault)

    engine.send = send  # type: ignore[method-assign]
    return engine


def engine_of(slot: ReplicaSlot) -> SimEngine:
    return cast(SimEngine, slot.replica.transport)


def assert_nothing_left(dispatcher: Dispatcher) -> None:
    assert not dispatcher.requests
    assert dispatcher.quarantine.suspect is None
    for slot in dispatcher.slots:
        assert slot.work.pending_tokens == 0
        assert not slot.requests
        assert slot.num_streams == 0
        engine_of(slot).check_idle()


def assert_caches_are_known(dispatcher: Dispatcher) -> None:
    for slot in dispatcher.slots:
        assert slot.prefixes.told == engine_of(slot).cached_keys()


async def start(
    count: int, policy: PolicyName = "least-pending-tokens", **fields: object
) -> tuple[Dispatcher, list[SimEngine]]:
    engines = [poisoned(SimEngine(engine_config(**fields), check_kv=True)) for _ in range(count)]
    return await start_fleet(engines, policy), engines


async def start_fleet(engines: Sequence[SimEngine], policy: PolicyName) -> Dispatcher:
    """A dispatcher that the end of the test closes, when all requests have left nothing behind."""
    dispatcher = Dispatcher([engine.replica for engine in engines], POLICIES[policy])
    await dispatcher.start()
    at_end(_end, dispatcher)
    return dispatcher


async def _end(dispatcher: Dispatcher) -> None:
    assert_nothing_left(dispatcher)
    await dispatcher.close()
