# SPDX-License-Identifier: Apache-2.0
"""Pods in virtual time: what prefill and decode hosts are given, and that nothing of it shows in an answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec
import pytest
from virtual_fleet import (
    Answer,
    ask,
    assert_nothing_left,
    at_end,
    engine_config,
    request,
    run_seeds,
    virtual,
)

from pagoda.errors import OverloadedError
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.outliers import SILENCE_S
from pagoda.fleet.policies import POLICIES, PolicyName
from pagoda.ipc.clock import LoopClock
from pagoda.messages.engine_config import HandoffConfig
from pagoda.messages.frontend import (
    FinishReason,
    FrontendMessage,
    GenerateRequest,
    KVSource,
    RequestRefused,
    TokenChunk,
    Work,
)
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import CurveKeys, Role
from pagoda.plugins.disaggregation.offload import PATIENCE_S, is_better_here
from pagoda.plugins.router.prefill_decode import PrefillDecodeRouter
from pagoda.plugins.simulate.engine import SimEngine
from pagoda.plugins.simulate.network import SimNetwork

P, D, NONE = Role.PREFILL, Role.DECODE, Role.NONE
LONG, SHORT = list(range(40)), list(range(10))
MIN_TOKENS = 16


KEYS = CurveKeys(server_key="", public_key="", secret_key="", server_secret_key="")
LEASE_S = 5.0


class Host(SimEngine):
    """An engine with a role, which remembers what it was given, and which can be made to misbehave."""

    def __init__(self, role: Role, network: SimNetwork, index: int, **fields: object) -> None:
        handoff = None
        if role is not NONE:
            handoff = HandoffConfig(role=role, host="sim", keys=KEYS, lease_s=LEASE_S)
        super().__init__(
            engine_config(handoff=handoff, **fields),
            check_kv=True,
            network=network,
            address=f"tcp://host{index}:1",
        )
        self.role = role
        self.taken: list[GenerateRequest] = []
        self.says_nothing = False
        """Of where KV will be."""
        self.is_full = False
        self.is_deaf = False

    def send(self, message: FrontendMessage) -> None:
        if isinstance(message, GenerateRequest):
            self.taken.append(msgspec.structs.replace(message, wire_id=""))
            if self.is_full:
                self.replica.receive(RequestRefused(message.wire_id, retry_after_s=1))
            if self.is_full or self.is_deaf:
                return
        super().send(message)

    def deliver(self, chunks: list[TokenChunk]) -> None:
        if self.says_nothing:
            chunks = [msgspec.structs.replace(chunk, kv_source=None) for chunk in chunks]
        super().deliver(chunks)

    @property
    def num_prefills(self) -> int:
        return sum(request.holds_kv for request in self.taken)

    async def num_fetched(self) -> int:
        """Tokens whose KV came from other engines."""
        return (await self.replica.load()).tiers[-1].num_loaded * 4


async def start(
    roles: Sequence[Role], policy: PolicyName = "least-pending-tokens", **fields: object
) -> tuple[PrefillDecodeRouter, list[Host]]:
    pod = PrefillDecodeRouter(POLICIES[policy], MIN_TOKENS)
    network = SimNetwork(LoopClock())
    hosts = [Host(role, network, index, **fields) for index, role in enumerate(roles)]
    for host in hosts:
        await host.start()
        pod.add(host.replica)
    at_end(end, pod, hosts)
    return pod, hosts


async def end(pod: PrefillDecodeRouter, hosts: Sequence[Host]) -> None:
    """Nothing is held for longer than a lease, on either side."""
    await asyncio.sleep(LEASE_S + 2)
    assert_nothing_left(pod.dispatcher)
    assert_nothing_left(pod.prefill)
    for host in hosts:
        if host.replica.state is ReplicaState.READY:
            assert (await host.replica.load()).num_leases == 0
        pod.remove(host.replica)
        await host.close()
    await pod.close()


def pending_tokens(dispatcher: Dispatcher) -> list[int]:
    return [slot.work.pending_tokens for slot in dispatcher.slots]


@virtual
async def test_a_long_prompt_goes_to_both_and_a_short_one_to_decode_alone() -> None:
    pod, [p, d] = await start([P, D])
    assert (await ask(pod.dispatcher, request("long", LONG))).complete
    assert (await ask(pod.dispatcher, request("short", SHORT))).complete
    [copy] = p.taken
    assert (copy.holds_kv, copy.prompt_token_ids, copy.request_id) == (
        True,
        LONG,
        "long/prefill0",
    )
    sources = [taken.kv_source and taken.kv_source.address for taken in d.taken]
    assert sources == ["tcp://host0:1", None]
    assert await d.num_fetched() == len(LONG) // 4 * 4
    assert not any(taken.holds_kv for taken in d.taken)


@virtual
async def test_what_is_believed_to_be_cached_is_not_computed_elsewhere() -> None:
    pod, [p, _] = await start([P, D])
    await ask(pod.dispatcher, request("first", LONG))
    again = await ask(pod.dispatcher, request("again", [*LONG, *SHORT]))
    more = await ask(pod.dispatcher, request("more", [*LONG, *LONG]))
    assert again.complete
    assert more.complete
    assert [r.request_id for r in p.taken] == ["first/prefill0", "more/prefill1"]


@virtual
async def test_hosts_without_a_role_get_no_source() -> None:
    pod, hosts = await start([P, NONE])
    assert (await ask(pod.dispatcher, request("r", LONG))).complete
    assert not hosts[0].taken


@virtual
async def test_the_shortest_queue_of_prefill_hosts_is_chosen_and_answers_are_shared_out() -> None:
    pod, hosts = await start([P, P, D, D])
    asking = [ask(pod.dispatcher, request(f"r{i}", [i, *LONG])) for i in range(12)]
    assert all(answer.complete for answer in await asyncio.gather(*asking))
    assert [host.num_prefills for host in hosts] == [6, 6, 0, 0]
    assert [len(host.taken) for host in hosts] == [6, 6, 6, 6]


@virtual
async def test_what_is_only_on_its_way_is_not_counted_on() -> None:
    """Neither waited for: who has it computed may leave, and its host may be lost."""
    pod, [p, d] = await start([P, D], base_s=0.5)
    first = asyncio.create_task(ask(pod.dispatcher, request("first", LONG)))
    await asyncio.sleep(0.01)
    sibling = asyncio.create_task(ask(pod.dispatcher, request("sibling", LONG)))
    await asyncio.sleep(0.01)
    first.cancel()
    assert (await sibling).complete
    assert [r.request_id for r in p.taken] == ["first/prefill0", "sibling/prefill1"]
    assert d.taken[-1].kv_source is not None


@virtual
async def test_a_prompt_that_others_compute_is_no_work_where_it_is_answered() -> None:
    pod, _ = await start([P, D], base_s=1.0)
    asking = asyncio.create_task(ask(pod.dispatcher, request("r", LONG, max_tokens=3)))
    await asyncio.sleep(0.1)
    assert pending_tokens(pod.dispatcher) == [0, 3]
    assert pending_tokens(pod.prefill) == [len(LONG) + 3]
    assert (await asking).complete


@pytest.mark.parametrize(
    ("waiting", "decoding", "num_streams", "is_here"),
    [
        (0, 0, 0, False),
        (100, 0, 0, False),
        (101, 0, 0, True),
        (300, 200, 0, False),
        (301, 200, 0, True),
        (101, 0, 1, False),
        (501, 0, 4, True),
    ],
)
def test_a_queue_of_prefill_hosts_is_weighed_against_what_the_prompt_would_hold_up(
    waiting: int, decoding: int, num_streams: int, is_here: bool
) -> None:
    """By a prompt of 100 tokens."""
    is_better = is_better_here(
        100, pending_here=decoding, num_streams=num_streams, pending_there=waiting
    )
    assert is_better == is_here


@virtual
async def test_an_idle_decode_host_computes_what_would_wait_behind_others() -> None:
    """Prompts come twice as fast as a prefill host computes them. But no streams stand still for one."""
    fields = {"per_token_s": 0.05, "max_num_batched_tokens": 16, "max_num_seqs": 32}
    pod, [p, _] = await start([P, D], num_blocks=512, **fields)

    async def ask_one_by_one(name: str, first_token: int) -> int:
        """How many of them are computed by the prefill host."""
        before = p.num_prefills
        asking = []
        for number in range(10):
            asked = request(f"{name}{number}", [first_token + number, *LONG], max_tokens=2)
            asking.append(asyncio.create_task(ask(pod.dispatcher, asked)))
            await asyncio.sleep(1.0)
        assert all(answer.complete for answer in await asyncio.gather(*asking))
        return p.num_prefills - before

    assert 4 <= await ask_one_by_one("idle", 100) <= 7
    asked = [request(f"stream{i}", [50 + i, *SHORT], max_tokens=100) for i in range(8)]
    streams = [asyncio.create_task(ask(pod.dispatcher, each)) for each in asked]
    await asyncio.sleep(5.0)
    assert await ask_one_by_one("busy", 200) == 10
    assert all(answer.complete for answer in await asyncio.gather(*streams))


@virtual
async def test_a_prefill_host_that_hangs_gets_nothing_more() -> None:
    pod, hosts = await start([P, P, D])
    hosts[0].is_deaf = True
    asking = []
    for index in range(20):
        asked = request(f"r{index}", [index, *LONG])
        asking.append(asyncio.create_task(ask(pod.dispatcher, asked)))
        await asyncio.sleep(0.2)
    assert all(answer.complete for answer in await asyncio.gather(*asking))
    assert len(hosts[0].taken) <= 5
    assert [r.state for r in (await pod.prefill.load()).replicas] == ["ejected", "ready"]
    assert sum(taken.kv_source is not None for taken in hosts[2].taken) >= 15


@virtual
async def test_a_decode_host_that_waits_for_kv_is_not_judged_by_its_silence() -> None:
    pod, hosts = await start([P, D, D], per_transferred_block_s=1.0)
    began = asyncio.get_running_loop().time()
    long = asyncio.create_task(ask(pod.dispatcher, request("long", LONG)))
    while not long.done():
        assert (await ask(pod.dispatcher, request(f"r{len(hosts[2].taken)}", [1]))).complete
        states = [replica.state for replica in (await pod.dispatcher.load()).replicas]
        assert states == ["ready"] * 3
    assert (await long).complete
    assert asyncio.get_running_loop().time() - began > 2 * SILENCE_S


@virtual
async def test_what_decode_hosts_have_no_room_for_does_not_go_to_prefill_hosts() -> None:
    pod, [p, d] = await start([P, D], max_num_seqs=1, max_num_waiting=1)
    asked = [request(f"r{index}", [index, *SHORT]) for index in range(6)]
    answers = await asyncio.gather(*(ask(pod.dispatcher, one) for one in asked))
    assert [answer.complete for answer in answers] == [True] * 2 + [False] * 4
    assert all(isinstance(answer.refusal, OverloadedError) for answer in answers[2:])
    d.is_full = True
    assert isinstance((await ask(pod.dispatcher, asked[0])).refusal, OverloadedError)
    assert not p.taken


@virtual
async def test_to_be_full_and_to_answer_bad_requests_is_no_illness() -> None:
    pod, hosts = await start([NONE, NONE])
    hosts[0].is_full = True
    for index in range(8):
        assert (await ask(pod.dispatcher, request(f"r{index}"))).complete
        bad = await ask(pod.dispatcher, request(f"bad{index}", [1] * 500))
        assert bad.finish is FinishReason.ERROR
    assert len(hosts[0].taken) >= 5
    states = [replica.state for replica in (await pod.dispatcher.load()).replicas]
    assert states == ["ready", "ready"]


@pytest.mark.parametrize("fault", ["silent", "full", "lost", "given up"])
@virtual
async def test_whatever_happens_to_prefill_is_no_error(fault: str) -> None:
    pod, hosts = await start([P, D])
    p, d = hosts
    p.says_nothing = fault == "silent"
    p.is_full = fault == "full"
    began = asyncio.get_running_loop().time()
    asking = asyncio.create_task(ask(pod.dispatcher, request("r", LONG)))
    await asyncio.sleep(0.001)
    if fault == "lost":
        p.kill(restart_s=100)
    elif fault == "given up":
        p.give_up("It was broken.")
        pod.remove(p.replica)
    answer = await asking
    assert answer.complete
    assert asyncio.get_running_loop().time() - began < PATIENCE_S + 0.5
    if fault in ("silent", "full"):
        assert [taken.kv_source for taken in d.taken] == [None]


@virtual
async def test_a_prompt_is_not_computed_for_an_answer_that_has_ended() -> None:
    pod, hosts = await start([P, D], base_s=0.05)
    answer = await ask(pod.dispatcher, request("r", LONG, max_tokens=2), leave_after=1)
    assert answer.left
    assert pod.prefill.num_requests(hosts[0].replica) == 0
    await asyncio.sleep(6)


@virtual
async def test_abort_while_the_request_is_prepared() -> None:
    pod, hosts = await start([P, D])
    hosts[0].says_nothing = True
    asking = asyncio.create_task(ask(pod.dispatcher, request("r", LONG)))
    await asyncio.sleep(0)
    await pod.dispatcher.abort("r")
    assert (await asking).finish is FinishReason.ABORT
    assert not hosts[1].taken


@virtual
async def test_a_lost_decode_host_is_followed_by_another_with_the_tokens_so_far() -> None:
    pod, hosts = await start([P, D, D])
    asking = asyncio.create_task(ask(pod.dispatcher, request("r", LONG, max_tokens=60)))
    await asyncio.sleep(0.3)
    first = next(host for host in hosts[1:] if host.taken)
    first.kill(restart_s=100)
    assert (await asking).complete
    [second] = [host for host in hosts[1:] if host is not first]
    assert hosts[0].num_prefills == 2
    [again] = second.taken
    assert again.output_token_ids
    assert again.kv_source is not None
    assert await second.num_fetched() > len(LONG)


@pytest.mark.parametrize("field", ["holds_kv", "kv_source"])
@virtual
async def test_what_somebody_else_has_arranged_goes_through_untouched(field: str) -> None:
    pod, hosts = await start([P, D])
    source = KVSource(address="elsewhere", engine_id="x", transfer_id="t")
    given = {"holds_kv": True} if field == "holds_kv" else {"kv_source": source}
    asked = msgspec.structs.replace(request("r", LONG), **given)
    chunks = [chunk async for chunk in pod.dispatcher.generate(asked)]
    assert [host.taken for host in hosts] == (
        [[asked], []] if field == "holds_kv" else [[], [asked]]
    )
    told = [chunk.kv_source for chunk in chunks if chunk.kv_source is not None]
    assert len(told) == (2 if field == "holds_kv" else 0)
    assert len({source.transfer_id for source in told}) <= 1


@virtual
async def test_prefill_hosts_answer_when_there_is_nobody_else() -> None:
    pod, hosts = await start([P, P])
    assert (await ask(pod.dispatcher, request("r", LONG))).complete
    late = Host(D, hosts[0].network, 2)
    await late.start()
    pod.add(late.replica)
    hosts.append(late)
    assert (await ask(pod.dispatcher, request("s", LONG))).complete
    assert [r.request_id for r in late.taken] == ["s"]
    assert sum(host.num_prefills for host in hosts) == 1


@pytest.mark.parametrize(
    ("roles", "role"),
    [([P, P], P), ([D, NONE], D), ([P, D], Role.BOTH), ([NONE], NONE), ([Role.BOTH, D], Role.BOTH)],
)
@virtual
async def test_a_pod_can_do_what_any_of_its_hosts_can(roles: list[Role], role: Role) -> None:
    pod, _ = await start(roles)
    assert pod.dispatcher.limits.role is role


@virtual
async def test_caches_are_followed_only_while_there_are_prefill_hosts() -> None:
    pod, hosts = await start([D, D], "round-robin")

    def are_followed() -> set[bool]:
        return {bool(host.replica.num_subscribers) for host in hosts}

    assert are_followed() == {False}
    p = Host(P, hosts[0].network, 2)
    await p.start()
    pod.add(p.replica)
    assert are_followed() == {True}
    pod.remove(p.replica)
    assert are_followed() == {False}
    pod.add(p.replica)
    assert (await ask(pod.dispatcher, request("r", LONG))).complete
    assert p.num_prefills == 1
    hosts.append(p)


# ---- hosts that do both


BOTH = Role.BOTH


@virtual
async def test_a_host_with_the_prefix_hands_it_to_the_one_that_answers() -> None:
    pod, [first, second] = await start([BOTH, BOTH], "round-robin")
    assert (await ask(pod.dispatcher, request("a", LONG))).complete
    assert [len(host.taken) for host in (first, second)] == [1, 0]  # nothing is gained elsewhere
    assert (await ask(pod.dispatcher, request("b", [*LONG, *SHORT]))).complete
    assert [taken.request_id for taken in first.taken] == ["a", "b/prefill0"]
    [taken] = second.taken
    assert (first.num_prefills, second.num_prefills) == (1, 0)
    assert taken.kv_source is not None
    assert await second.num_fetched() == len([*LONG, *SHORT]) // 4 * 4
    assert pending_tokens(pod.dispatcher) == [0, 0]


@virtual
async def test_an_idle_host_computes_a_prompt_that_would_hold_up_others_answers() -> None:
    pod, [busy, idle] = await start([BOTH, BOTH], "round-robin")
    stream = asyncio.create_task(ask(pod.dispatcher, request("s", [99], max_tokens=60)))
    await asyncio.sleep(0.01)
    assert (await ask(pod.dispatcher, request("t", [98], max_tokens=1))).complete
    assert (await ask(pod.dispatcher, request("long", LONG))).complete
    assert [taken.request_id for taken in idle.taken] == ["t", "long/prefill0"]
    assert busy.taken[-1].kv_source is not None
    assert await busy.num_fetched() == len(LONG) // 4 * 4
    assert (await stream).complete


@virtual
async def test_a_prompt_goes_where_it_holds_up_fewer_answers_than_at_the_host_with_less_to_do() -> (
    None
):
    pod, hosts = await start([BOTH, BOTH], "prefix-affinity")
    known = Work(SamplingParams(seed=1, max_tokens=100, min_tokens=100))
    asked = [msgspec.structs.replace(request("long", [99]), work=known)]
    asked += [request(f"short{number}", [number], max_tokens=15) for number in range(4)]
    streams = []
    for one in asked:
        streams.append(asyncio.create_task(ask(pod.dispatcher, one)))
        await asyncio.sleep(0.001)
    while sum(slot.num_streams for slot in pod.dispatcher.slots) < len(asked):
        await asyncio.sleep(0.001)
    few, many = sorted(hosts, key=lambda host: len(host.taken))
    assert [len(few.taken), len(many.taken)] == [1, 4]
    assert (await ask(pod.dispatcher, request("prompt", LONG, max_tokens=4))).complete
    assert (few.num_prefills, many.num_prefills) == (1, 0)
    assert many.taken[-1].kv_source is not None
    assert all([(await stream).complete for stream in streams])


@pytest.mark.parametrize("fault", ["full", "refuses", "silent", "lost", "alone", "short"])
@virtual
async def test_a_host_that_cannot_help_is_no_error(fault: str) -> None:
    roles = [BOTH, NONE] if fault == "alone" else [BOTH, BOTH]
    pod, [first, second] = await start(roles, "round-robin", max_num_seqs=2)
    assert (await ask(pod.dispatcher, request("a", LONG))).complete
    asked = request("b", LONG[:12] if fault == "short" else [*LONG, *SHORT], max_tokens=30)
    streams = []
    if fault == "full":
        for number in range(4):
            body = request(f"s{number}", [number], max_tokens=100)
            streams.append(asyncio.create_task(ask(pod.dispatcher, body)))
            await asyncio.sleep(0.01)
    first.is_full, first.says_nothing = fault == "refuses", fault == "silent"
    asking = asyncio.create_task(ask(pod.dispatcher, asked))
    if fault == "lost":
        await asyncio.sleep(0.001)
        assert second.taken[-1].kv_source is not None
        first.kill(restart_s=1.0)
    assert (await asking).complete
    assert first.num_prefills == (fault in ("refuses", "silent", "lost"))
    assert (second.taken[-1].kv_source is None) == (fault != "lost")
    assert all(answer.complete for answer in await asyncio.gather(*streams))


# ---- whole lives


async def live(seed: int) -> int:
    """How many requests there were."""
    rng = random.Random(seed)
    roles = [rng.choice([P, D, Role.BOTH, NONE]) for _ in range(rng.randint(1, 6))]
    pod, hosts = await start(
        roles,
        rng.choice(list(POLICIES)),
        num_blocks=rng.choice([40, 200]),
        base_s=rng.choice([0.005, 0.05]),
        per_transferred_block_s=rng.choice([0.0, 0.02]),
    )
    asking: list[asyncio.Task[Answer]] = []
    mortal, impatient = rng.choice([0.0, 0.1]), rng.choice([0.0, 0.5])
    for index in range(rng.randint(1, 40)):
        host = rng.choice(hosts)
        host.says_nothing, host.is_full = rng.random() < 0.05, host.role is P and rng.random() < 0.1
        prompt = [rng.randrange(3)] * rng.choice([0, 24]) + [index] * rng.randint(1, 30)
        asked = request(f"r{index}", prompt, rng.randint(1, 40))
        leave_after = rng.choice([None, None, None, 1, 5])
        asking.append(asyncio.create_task(ask(pod.dispatcher, asked, leave_after=leave_after)))
        await asyncio.sleep(rng.expovariate(50))
        if rng.random() < impatient:
            rng.choice(asking).cancel()
        if rng.random() < mortal:
            rng.choice(hosts).kill(restart_s=rng.choice([0.05, 1.0]))
    for answer in await asyncio.gather(*asking, return_exceptions=True):
        if isinstance(answer, asyncio.CancelledError):
            continue
        assert isinstance(answer, Answer), answer
        if answer.finish is FinishReason.ERROR:
            assert mortal
        elif answer.refusal is not None:
            assert not answer.tokens
        else:
            assert answer.complete or answer.left
    return len(asking)


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_seeds(first: int) -> None:
    assert sum(run_seeds(live, range(first, first + 40))) > 600
