# SPDX-License-Identifier: Apache-2.0
"""One seed, one life: the fleet, what clients ask of it, and what goes wrong, drawn before anything runs."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count as count_from

import msgspec

from pagoda.fleet.policies import POLICIES, PolicyName
from pagoda.fleet.takers import SMALL_FLEET
from pagoda.kv.capacity import segment_blocks
from pagoda.kv.manager import KVManager
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.kv_groups import KVGroup, KVKind, layer_groups
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import Role

VOCAB_SIZE = 50
WORKER_POISON = VOCAB_SIZE - 1
"""A token that the worker dies of, whenever it computes it in a prompt."""
ENGINE_POISON = VOCAB_SIZE - 2
"""A token that the engine dies of, soon after it has taken it in a prompt."""
ADAPTER = "a" * 64
"""Digest of the adapter that all engines have."""
LEASE_S = 3.0
ENGINE_TIMEOUT_S = 2.0
STEP_TIMEOUT_S = 1.0
NO_REPLICA_TIMEOUT_S = 20.0
FOR_EVER_S = 1e6
"""Longer than any life: what hangs so long hangs until somebody ends it."""
_LARGE = 10


class Kind(enum.StrEnum):
    """Faults; what `Fault.value` means stands behind each."""

    KILL_WORKER = "kill worker"
    """Nothing."""
    HANG_WORKER = "hang worker"
    """Seconds; those above `STEP_TIMEOUT_S` end with the worker."""
    KILL_ENGINE = "kill engine"
    """Seconds until another is there."""
    HANG_ENGINE = "hang engine"
    """Seconds; those above `ENGINE_TIMEOUT_S` end with the engine as soon as it owes an answer."""
    KILL_HOST = "kill host"
    """Seconds until another is there."""
    LEAVE_HOST = "leave host"
    """Seconds from when the host has finished until another is there."""
    STALL_HOST = "stall host"
    """Seconds in which it reads no message."""
    KILL_ROUTER = "kill router"
    """Seconds until another is there."""
    STALL_ROUTER = "stall router"
    """Seconds in which it reads no message."""
    CUT_LINKS = "cut links"
    """Seconds in which nothing passes between routers and the host; long ones are noticed at both ends."""
    CUT_HANDOFF = "cut handoff"
    """Nothing: connections of other engines to the host's engines end."""
    HANG_DISK = "hang disk"
    """Seconds in which the host's disks answer nothing."""
    LOSE_OBJECTS = "lose objects"
    """Share of the objects on the host's disks that vanish."""


@dataclass(frozen=True)
class Fault:
    """Happens to one host or router, at an instant in virtual seconds; `target` is a number modulo those there."""

    at: float
    kind: Kind
    target: int
    value: float


@dataclass(frozen=True)
class HostPlan:
    """One process with a dispatcher, and its engines."""

    role: Role
    num_engines: int
    num_blocks: int
    """Blocks of each rank that holds other blocks than others."""
    clock_offset_s: float
    ranks: str = "one"
    """`one`, or two in each engine: `own requests`, or `segments` of every request."""

    @property
    def num_ranks(self) -> int:
        return 1 if self.ranks == "one" else 2


@dataclass(frozen=True)
class EnginePlan:
    """All engines of a fleet are alike but for what `HostPlan` says."""

    block_size: int
    max_model_len: int
    groups: tuple[KVGroup, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_waiting: int
    num_stages: int
    prefix_caching: bool
    host_slots: int
    has_disk: bool
    min_touches: int
    fails_on_load_failure: bool
    base_s: float
    per_token_s: float
    per_block_s: float
    drafts: str = "off"
    """`off`, `suffix`, or `worker` for a drafter of the worker."""
    segment_tokens: int = 0
    """Tokens of segments of requests that do not fit the device; 0 where all fit."""
    per_cold_block_s: float = 0.0


@dataclass(frozen=True)
class Chances:
    """Chances of faults that may happen to any message or transfer, and how late things are."""

    message_late: float
    """Chance of a message between processes to be late."""
    late_s: float
    """The most that such a message is late."""
    handoff_dropped: float
    handoff_late: float
    handoff_twice: float
    transfer_failed: float
    transfer_late: float
    loop_late: float
    """Chance of a wake-up of an event loop or an engine to be late."""
    loop_late_s: float

    @property
    def is_late(self) -> bool:
        """True if event loops or messages may be late."""
        return self.message_late > 0 or self.loop_late > 0


@dataclass(frozen=True)
class Ask:
    """One client with one request."""

    at: float
    number: int
    router: int
    """Number of a router or, below 0, of a host that is asked directly."""
    request: GenerateRequest
    num_retries: int
    """Number of times that it comes again when it is refused."""
    leaves_after: int | None
    """Tokens after which the client goes away."""
    cancels_at: float | None
    """Seconds after `at` at which the client hangs up."""
    aborts_at: float | None
    """Seconds after `at` at which an operator ends the request."""
    reads_every_s: float
    """Seconds that the client takes for each chunk."""
    nan_at: int | None
    """Output position at which the model's logits are NaN."""


@dataclass(frozen=True)
class Plan:
    """A life, before it is lived."""

    seed: int
    engine: EnginePlan
    hosts: tuple[HostPlan, ...]
    num_routers: int
    policy: PolicyName
    min_tokens: int
    """Tokens from which on prompts are computed by prefill hosts."""
    chances: Chances
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]

    def lines(self) -> Iterator[str]:
        """The plan in words, one thing a line."""
        yield f"seed {self.seed}: {len(self.hosts)} hosts, {self.num_routers} routers, {self.policy}"
        parts: list[EnginePlan | Chances | HostPlan] = [self.engine, self.chances, *self.hosts]
        for part in parts:
            values = (f"{it.name}={getattr(part, it.name)!r}" for it in fields(part))
            yield f"  {type(part).__name__} {' '.join(values)}"
        yield from (f"  {ask}" for ask in self.asks)
        for fault in self.faults:
            yield f"  {fault.at:.4f} {fault.kind} {fault.target} {fault.value:.4f}"


def draw(seed: int) -> Plan:
    """The life of this seed; equal in every process."""
    rng = random.Random(seed)
    # A few lives are ten times as large as most; their fleets may have more members than are looked at for each
    # request.
    size = rng.choice([1, 1, 1, 2, 2, 3]) if rng.random() < 0.997 else _LARGE
    engine = _draw_engine(rng)
    num_routers = rng.choice([0, 0, 1, 1, 2])
    num_hosts = rng.randint(1, 1 + size + SMALL_FLEET * (size == _LARGE)) if num_routers else 1
    with_handoff = num_hosts > 1 and rng.random() < 0.6
    hosts = tuple(_draw_host(rng, engine, size, with_handoff) for _ in range(num_hosts))
    num_asks = rng.randint(2, 4 + 4 * size)
    span_s = rng.choice([0.02, 0.1, 0.5])
    asks = _draw_asks(rng, engine, num_routers, num_hosts, num_asks, span_s)
    asks = _with_shares(random.Random(f"{seed} shares"), asks)
    engine, hosts = _with_segments(random.Random(f"{seed} segments"), engine, hosts)
    hosts = _with_ranks(random.Random(f"{seed} ranks"), engine, hosts)
    drafts = random.Random(f"{seed} drafts").choice(["off", "suffix", "worker"])
    return Plan(
        seed=seed,
        engine=replace(engine, drafts=drafts),
        hosts=hosts,
        num_routers=num_routers,
        policy=rng.choice(sorted(POLICIES)),
        min_tokens=rng.choice([1, 6, 12]),
        chances=_draw_chances(rng),
        asks=asks,
        faults=_draw_faults(rng, size, span_s),
    )


def _draw_engine(rng: random.Random) -> EnginePlan:
    block_size = rng.choice([1, 2, 4, 4])
    has_tiers = rng.random() < 0.4
    return EnginePlan(
        block_size=block_size,
        max_model_len=rng.choice([12, 20, 32]),
        groups=_draw_groups(rng, block_size),
        max_num_seqs=rng.choice([1, 2, 4, 8]),
        max_num_batched_tokens=rng.choice([3, 8, 16, 64]),
        max_num_waiting=rng.choice([0, 1, 2, 4, 100, 100]),
        num_stages=rng.choice([1, 1, 1, 2]),
        prefix_caching=rng.random() < 0.9,
        host_slots=rng.choice([0, 2, 8, 32]) if has_tiers else 0,
        has_disk=has_tiers and rng.random() < 0.7,
        min_touches=rng.choice([1, 1, 2]),
        fails_on_load_failure=rng.random() < 0.1,
        base_s=rng.choice([0.002, 0.01]),
        per_token_s=rng.choice([0.0, 0.0005]),
        per_block_s=rng.choice([0.0, 0.002]),
    )


def _draw_groups(rng: random.Random, block_size: int) -> tuple[KVGroup, ...]:
    full, window = (KVKind.FULL, 0), (KVKind.WINDOW, 2 * block_size + 1)
    state = KVGroup(layers=(9,), kind=KVKind.STATE, block_size=2 * block_size)
    match rng.randrange(10):
        case 0:
            return layer_groups([window], block_size)
        case 1:
            return layer_groups([window, full, window], block_size, window_multiple=2)
        case 2:
            return layer_groups([full, (KVKind.CHUNK, 3 * block_size)], block_size)
        case 3:
            return (*layer_groups([full], block_size), state)
        case 4:
            return (*layer_groups([window, full], block_size), state)
    return layer_groups([full], block_size)


def _draw_host(rng: random.Random, engine: EnginePlan, size: int, handoff: bool) -> HostPlan:
    run_tokens = engine.max_num_batched_tokens * engine.num_stages
    needed = sum(it.most_blocks(0, engine.max_model_len, run_tokens) for it in engine.groups)
    return HostPlan(
        role=rng.choice([Role.PREFILL, Role.DECODE, Role.DECODE, Role.BOTH, Role.NONE])
        if handoff
        else Role.NONE,
        num_engines=rng.randint(1, 1 + (size > 1)),
        num_blocks=needed + rng.choice([0, 0, 1, needed // 2, needed, 4 * needed]),
        clock_offset_s=rng.choice([0.0, 0.0, -0.5, 7.25, 1e5]),
    )


def _with_segments(
    rng: random.Random, engine: EnginePlan, hosts: tuple[HostPlan, ...]
) -> tuple[EnginePlan, tuple[HostPlan, ...]]:
    """Devices that do not hold a long request, above storeys that do, in some lives."""
    is_able = engine.prefix_caching and any(group.keeps_all for group in engine.groups)
    if rng.random() < 0.7 or not is_able or any(host.role is not Role.NONE for host in hosts):
        return engine, hosts
    size = engine.block_size * rng.choice([1, 2, 3])
    each = segment_blocks(engine.groups, size)
    num_needed = -(-engine.max_model_len // size) * each
    host_slots = rng.choice([0, each, num_needed, 3 * num_needed])
    engine = replace(
        engine,
        host_slots=host_slots,
        has_disk=host_slots < num_needed or engine.has_disk,
        segment_tokens=size,
        per_cold_block_s=rng.choice([0.0, 0.001, 0.05]),
    )
    num_cold = num_needed // each
    fitting = (
        count
        for count in count_from(1)
        if KVManager(
            count,
            engine.block_size,
            groups=engine.groups,
            run_tokens=engine.max_num_batched_tokens * engine.num_stages,
            segment_tokens=size,
            num_cold_segments=num_cold,
        ).fit(engine.max_model_len)
    )
    least = next(fitting)
    hosts = tuple(
        replace(host, num_blocks=least + rng.choice([0, 0, 1, 3, least // 2])) for host in hosts
    )
    return engine, hosts


def _with_ranks(
    rng: random.Random, engine: EnginePlan, hosts: tuple[HostPlan, ...]
) -> tuple[HostPlan, ...]:
    """Hosts of two ranks with blocks of their own, in some lives; nothing is streamed there."""
    if rng.random() < 0.7 or engine.segment_tokens:
        return hosts
    kinds = ["one", "own requests"]
    if len(engine.groups) == 1 and engine.groups[0].kind is KVKind.FULL:
        kinds.append("segments")
    return tuple(replace(host, ranks=rng.choice(kinds)) for host in hosts)


def _draw_chances(rng: random.Random) -> Chances:
    def sometimes(*values: float) -> float:
        return rng.choice(values) if rng.random() < 0.35 else 0.0

    return Chances(
        message_late=sometimes(0.05, 0.3),
        late_s=rng.choice([0.005, 0.05, 0.5]),
        handoff_dropped=sometimes(0.02, 0.2),
        handoff_late=sometimes(0.1, 0.3),
        handoff_twice=sometimes(0.1, 0.3),
        transfer_failed=sometimes(0.1, 0.3),
        transfer_late=sometimes(0.1, 0.3),
        loop_late=rng.choice([0.0, 0.1, 0.5]),
        loop_late_s=rng.choice([0.003, 0.03, 0.2]),
    )


def _draw_asks(
    rng: random.Random,
    engine: EnginePlan,
    num_routers: int,
    num_hosts: int,
    count: int,
    span_s: float,
) -> tuple[Ask, ...]:
    documents = [[_draw_token(rng) for _ in range(engine.max_model_len)] for _ in range(2)]
    impatient = rng.choice([0.0, 0.0, 0.3])
    nan, poison = rng.choice([0.0, 0.0, 0.1]), rng.choice([0.0, 0.0, 0.0, 0.1])
    priorities = rng.choice([(0,), (0, 0, 1, -1)])
    asks: list[Ask] = []
    at = 0.0
    while len(asks) < count:
        at += rng.expovariate(count / span_s)
        prompt = _draw_prompt(rng, engine.max_model_len, documents)
        if rng.random() < poison:
            prompt[rng.randrange(len(prompt))] = rng.choice([WORKER_POISON, ENGINE_POISON])
        direct = num_routers == 0 or rng.random() < 0.1
        router = -1 - rng.randrange(num_hosts) if direct else rng.randrange(num_routers)
        ends = tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 1, 2])))
        priority, cache_salt = rng.choice(priorities), rng.choice([None, None, "salt"])
        adapter = rng.choice(["", "", "", ADAPTER])
        session = rng.choice([None, f"s{prompt[0] % 3}"])
        # Several answers of one prompt come at once.
        for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
            number = len(asks)
            request = GenerateRequest(
                request_id=f"r{number}",
                prompt_token_ids=prompt,
                work=Work(_draw_sampling(rng), eos_token_ids=ends, adapter=adapter),
                priority=priority,
                cache_salt=cache_salt,
                session=session,
            )
            is_left = rng.random() < impatient
            way = rng.randrange(3) if is_left else 3
            asks.append(
                Ask(
                    at=at,
                    number=number,
                    router=router,
                    request=request,
                    num_retries=rng.choice([0, 0, 3]),
                    leaves_after=rng.randint(1, 4) if way == 0 else None,
                    cancels_at=rng.choice([0.0, 0.001, 0.02, 0.1]) if way == 1 else None,
                    aborts_at=rng.choice([0.0, 0.001, 0.02, 0.1]) if way == 2 else None,
                    reads_every_s=rng.choice([0.0, 0.0, 0.0, 0.02]),
                    nan_at=rng.randrange(5) if rng.random() < nan else None,
                )
            )
    return tuple(asks[:count])


def _with_shares(rng: random.Random, asks: Sequence[Ask]) -> tuple[Ask, ...]:
    """Gives requests keys, among which engines share out their tokens, and deadlines, in some lives."""
    tenants = rng.choice([("",), ("heavy", "heavy", "heavy", "light")])
    deadlines = rng.choice([(None,), (None, None, None, 0.0, 0.05, 2.0)])
    return tuple(
        replace(
            it,
            request=msgspec.structs.replace(
                it.request, tenant=rng.choice(tenants), timeout_s=rng.choice(deadlines)
            ),
        )
        for it in asks
    )


def _draw_token(rng: random.Random) -> int:
    """A token that nothing dies of."""
    return rng.randrange(VOCAB_SIZE) % ENGINE_POISON


def _draw_prompt(
    rng: random.Random, max_model_len: int, documents: Sequence[list[int]]
) -> list[int]:
    """A beginning that others have too, then something of its own; now and then too long."""
    shared = rng.choice([0, 4, 8, 12, max_model_len])
    own = [_draw_token(rng) for _ in range(rng.randint(1, 10))]
    prompt = rng.choice(documents)[:shared] + own
    most = max_model_len + (rng.random() < 0.02) * rng.randint(0, 2) - 1
    return prompt[: max(1, most)]


def _draw_sampling(rng: random.Random) -> SamplingParams:
    min_tokens = rng.choice([0, 0, 3])
    return SamplingParams(
        seed=rng.randrange(2**63),
        max_tokens=max(min_tokens, rng.choice([1, 2, 3, 4, 6, 8, 16])),
        min_tokens=min_tokens,
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 2]))),
        logprobs=rng.choice([None, None, None, 1]),
        prompt_logprobs=rng.choice([None] * 9 + [1]),
    )


_VALUES: dict[Kind, tuple[float, ...]] = {
    Kind.KILL_WORKER: (0.0,),
    Kind.HANG_WORKER: (0.01, 0.1, 0.5, 2 * STEP_TIMEOUT_S),
    Kind.KILL_ENGINE: (0.01, 0.3, 3.0),
    Kind.HANG_ENGINE: (0.05, 0.5, FOR_EVER_S),
    Kind.KILL_HOST: (0.1, 2.0, 12.0),
    Kind.LEAVE_HOST: (0.1, 2.0),
    Kind.STALL_HOST: (0.05, 1.0, 5.0, 40.0),
    Kind.KILL_ROUTER: (0.1, 2.0),
    Kind.STALL_ROUTER: (0.05, 1.0, 5.0),
    Kind.CUT_LINKS: (0.1, 1.0, 8.0),
    Kind.CUT_HANDOFF: (0.0,),
    Kind.HANG_DISK: (0.1, 2.0, FOR_EVER_S),
    Kind.LOSE_OBJECTS: (0.3, 1.0),
}


def _draw_faults(rng: random.Random, size: int, span_s: float) -> tuple[Fault, ...]:
    """Each life has a few kinds of faults, and some have none."""
    kinds = rng.sample(sorted(Kind), rng.choice([0, 1, 2, 4]))
    count = rng.randint(0, 2 + size) if kinds else 0
    faults = []
    for _ in range(count):
        kind = rng.choice(kinds)
        at = rng.uniform(0.0, 2 * span_s + 0.1)
        faults.append(Fault(at, kind, rng.randrange(60), rng.choice(_VALUES[kind])))
    return tuple(sorted(faults, key=lambda fault: fault.at))
