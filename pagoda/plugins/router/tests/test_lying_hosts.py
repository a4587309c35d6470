# SPDX-License-Identifier: Apache-2.0
"""Hosts that say what cannot be: a router gives them up, keeps nothing of them, and serves with the others."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable

import msgspec
import pytest
from mutated_messages import lies
from scripted_endpoint import LIMITS

from pagoda.errors import DeadlineError, InvalidRequestError, OverloadedError
from pagoda.fleet.answer_check import AnswerCheck, PeerError
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.policies import POLICIES
from pagoda.fleet.prefix_index import short_keys_in
from pagoda.ipc.codec import Codec
from pagoda.messages.adapters import AdapterLoaded
from pagoda.messages.frontend import (
    EngineFailed,
    FinishReason,
    GenerateRequest,
    Hello,
    HostLeave,
    KVSource,
    LoadQuery,
    Pooling,
    PrefixCacheUpdate,
    PromptLogprobs,
    RequestRefused,
    StepBin,
    StepStatistics,
    TokenChunk,
    TokenChunks,
    TokenLogprobs,
    Work,
)
from pagoda.messages.kv_groups import KVGroup, KVKind
from pagoda.messages.load import LoadReport, ProcessMemory, ReplicaLoad, StepTotals, TierLoad
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.tracing import ClockPing, TraceStopped
from pagoda.plugins.router.host_client import HostClient, Identity
from pagoda.plugins.router.messages import HostMessage, RouterMessage

ROUTER = Identity("router", "m", "1", is_router=True)
GROUP = KVGroup(layers=(0, 1), kind=KVKind.WINDOW, block_size=32, window=64)
READY = msgspec.structs.replace(LIMITS, host_id="liar", routers=("r1",), kv_group=GROUP)
ASKED = SamplingParams(seed=1, max_tokens=4, logprobs=2, prompt_logprobs=1)
PROMPT = [5, 6, 7]
SCORES = PromptLogprobs(
    1, 1, array("i", [1, 1]).tobytes(), array("i", [6, 7]).tobytes(), array("f", [-1] * 4).tobytes()
)
SOURCE = KVSource(address="tcp://h:1", engine_id="e", transfer_id="t", block_ids=(1, 2))
LOGPROBS = TokenLogprobs(-0.5, 1, [3, 4], [-0.5, -1.0])
REPORT = LoadReport(
    num_running=1,
    step_time_s=0.1,
    expert_tokens=[1, 2],
    steps=StepTotals(1, 1, [1], [1], 0.1),
    tiers=(TierLoad(name="host", num_blocks=3),),
    processes=(ProcessMemory("worker", 1, 2),),
    query_id=1,
    replicas=(ReplicaLoad(name="0", state="ready", num_requests=1, weighed_tokens=1),),
)
MESSAGES: list[HostMessage] = [
    READY,
    REPORT,
    TokenChunks([TokenChunk("1", [3], None, None, [LOGPROBS], 2, prompt_logprobs=SCORES)]),
    TokenChunks([TokenChunk("1", [], num_computed_tokens=2, queue_time_s=0.1, kv_source=SOURCE)]),
    TokenChunks([TokenChunk("1", [], FinishReason.ERROR, error="no", blamed_field="grammar")]),
    PrefixCacheUpdate(bytes(range(16)), bytes(range(16, 24)), starts_anew=True),
    RequestRefused("1", 1),
    StepStatistics([StepBin(0.1, 1, 1, 0.1, 1, 1, 1)]),
    TraceStopped(["late"]),
    AdapterLoaded("digest", "no"),
    ClockPing(1),
    HostLeave(),
    EngineFailed("another model", is_user_error=True),
]


class Wire:
    """Both ends of a connection without a socket: a test is the host."""

    def __init__(self, answers: Callable[[Wire, RouterMessage], None]) -> None:
        self._answers = answers
        self._decode = Codec[RouterMessage](RouterMessage).decode
        self.closed, self.port = False, 1

    def client(self, on_message: Callable[[list[bytes]], None], _: object) -> Wire:
        self.say = lambda message: on_message([msgspec.msgpack.encode(message)])
        self.say_bytes = lambda payload: on_message([payload])
        return self

    def connect(self, _: str) -> None:
        pass

    def send(self, *frames: bytes) -> None:
        self._answers(self, self._decode(frames[0]))

    def close(self) -> None:
        self.closed = True


def honest(wire: Wire, message: RouterMessage) -> None:
    match message:
        case Hello():
            wire.say(LIMITS)
        case LoadQuery(query):
            wire.say(LoadReport(query_id=query))
        case GenerateRequest():
            num_left = 4 - len(message.output_token_ids)
            top = TokenLogprobs(-0.5, 1, [9, 8], [-0.5, -1.0])
            end = [9] * num_left, FinishReason.LENGTH, None, [top] * num_left
            chunk = TokenChunk(message.wire_id, *end, prompt_logprobs=SCORES)
            asyncio.get_running_loop().call_soon(wire.say, TokenChunks([chunk]))


def liar(wire: Wire, message: RouterMessage) -> None:
    match message:
        case Hello():
            wire.say(READY)
        case LoadQuery():
            wire.say(msgspec.structs.replace(REPORT, query_id=message.query_id))


class Fleet:
    """A router with an honest host, and one that lies; every request goes to the liar first."""

    def __init__(self) -> None:
        self.wires = {"a": Wire(honest), "b": Wire(liar)}
        self.hosts = {
            name: HostClient(wire, f"tcp://{name}:1", ROUTER)  # type: ignore[arg-type]
            for name, wire in self.wires.items()
        }
        self.encode = Codec[HostMessage](HostMessage).encode
        self.decode = Codec[HostMessage](HostMessage).decode
        self.router = Dispatcher([], POLICIES["prefix-affinity"])
        self.told: set[int] = set()
        """Blocks that a router above knows of."""
        self.router.subscribe_cache(self._hear)

    def _hear(self, update: PrefixCacheUpdate) -> None:
        self.check_what_is_told(update)
        self.told -= set(short_keys_in(update.removed))
        self.told |= set(short_keys_in(update.stored))

    async def begin(self) -> asyncio.Task[list[int]]:
        """A request that is with the liar."""
        self.add(await self.started("b"))
        asking = asyncio.create_task(self.ask())
        while not self.hosts["b"].replica.num_streams:
            await asyncio.sleep(0)
        self.add(await self.started("a"))
        return asking

    async def started(self, name: str) -> HostClient:
        await self.hosts[name].start()
        return self.hosts[name]

    def add(self, host: HostClient) -> None:
        self.router.add(host.replica)

    async def ask(self) -> list[int]:
        asked = GenerateRequest(request_id="r", prompt_token_ids=PROMPT, work=Work(ASKED))
        return [i async for chunk in self.router.generate(asked) for i in chunk.token_ids]

    def check_what_is_told(self, *messages: HostMessage) -> None:
        """A router above takes what this one says."""
        for message in messages:
            self.decode(self.encode(message))

    async def close(self) -> None:
        for host in self.hosts.values():
            await host.close()
        await self.router.close()


@pytest.mark.parametrize("index", range(len(MESSAGES)))
async def test_a_router_survives_every_lie_and_serves_with_the_others(
    index: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    num_lost = num_lies = 0
    for payload in lies(MESSAGES[index]):
        fleet = Fleet()
        asking = await fleet.begin()
        lied = fleet.hosts["b"].replica
        fleet.wires["b"].say_bytes(payload)
        is_lost = lied.state is ReplicaState.FAILED
        num_lost, num_lies = num_lost + is_lost, num_lies + 1
        if not is_lost:  # what it said can be: what the router makes of it can be, too
            report = await fleet.router.load()
            fleet.check_what_is_told(fleet.router.limits, report)
            await fleet.hosts["b"].close()
        [tokens] = await asyncio.gather(asking, return_exceptions=True)
        if isinstance(tokens, BaseException):
            assert isinstance(tokens, InvalidRequestError | OverloadedError | DeadlineError)
            assert isinstance(MESSAGES[index], TokenChunks | RequestRefused)
        else:
            assert all(token < LIMITS.vocab_size for token in tokens)
        fleet.router.remove(lied)
        assert fleet.router.limits == LIMITS
        assert fleet.told == set()
        assert await fleet.ask() == [9] * 4
        fleet.check_what_is_told(await fleet.router.load())
        await fleet.close()
    assert not caplog.records, caplog.records[0].getMessage()
    says_nothing = isinstance(MESSAGES[index], HostLeave)
    assert says_nothing == (num_lies == 0)
    assert says_nothing or num_lost > num_lies / 4, "lies are found out"


@pytest.mark.parametrize("resident_bytes", [-1, 2**60])
def test_the_memory_of_a_process_is_an_amount(resident_bytes: int) -> None:
    memory = ProcessMemory("worker", 1, resident_bytes)
    payload = msgspec.msgpack.encode(msgspec.structs.replace(REPORT, processes=(memory,)))
    with pytest.raises(msgspec.DecodeError, match="processes"):
        Codec[HostMessage](HostMessage).decode(payload)


GOOD = TokenChunk("1", [3], None, None, [LOGPROBS], 2, prompt_logprobs=SCORES)


@pytest.mark.parametrize(
    ("changes", "clause"),
    [
        ({"token_ids": [512]}, "sent token 512, and its vocabulary has 512"),
        ({"token_ids": [1] * 5, "logprobs": [LOGPROBS] * 5}, "more tokens of an answer than"),
        ({"num_cached_tokens": 4}, "more cached tokens than a prompt has"),
        ({"logprobs": []}, "log-probabilities of other tokens"),
        ({"logprobs": [TokenLogprobs(-1, 1, [1], [])]}, "not asked for, or of no tokens"),
        ({"logprobs": [TokenLogprobs(-1, 1, [512], [-1])]}, "or of no tokens"),
        ({"logprobs": [TokenLogprobs(-1, 1, [1] * 3, [-1] * 3)]}, "that were not asked for, or"),
        ({"prompt_logprobs": None}, "without the log-probabilities of its prompt"),
        ({"prompt_logprobs": {"first": 2}}, "of a prompt that were not asked for"),
        ({"prompt_logprobs": {"num_top": 2}}, "that the prompt cannot have"),
        ({"prompt_logprobs": {"ranks": b"1234567"}}, "that the prompt cannot have"),
        ({"prompt_logprobs": {"top_token_ids": b"\xff" * 8}}, "that the prompt cannot have"),
        ({"embedding": b"1234"}, "a vector that was not asked for"),
    ],
)
def test_a_chunk_that_cannot_be_of_the_answer_is_refused(
    changes: dict[str, object], clause: str
) -> None:
    if isinstance(scores := changes.get("prompt_logprobs"), dict):
        changes = {"prompt_logprobs": msgspec.structs.replace(SCORES, **scores)}
    asked = GenerateRequest(request_id="r", prompt_token_ids=PROMPT, work=Work(ASKED))
    AnswerCheck(asked, 512).take(GOOD)
    with pytest.raises(PeerError, match=clause):
        AnswerCheck(asked, 512).take(msgspec.structs.replace(GOOD, **changes))


def test_a_vector_is_whole() -> None:
    sampling = SamplingParams(seed=1, max_tokens=0)
    for pooling, good, bad in (
        (Pooling.LAST, 8, (0, 7)),
        (Pooling.SCORE, 12, (0, 5)),
        (Pooling.ALL, 24, (0, 8)),
    ):
        asked = GenerateRequest(
            request_id="r", prompt_token_ids=PROMPT, work=Work(sampling, pooling=pooling)
        )
        end = TokenChunk("1", [], FinishReason.LENGTH, embedding=bytes(good))
        AnswerCheck(asked, 512).take(end)
        for size in bad:
            with pytest.raises(PeerError, match="sent no vector, or a part of one"):
                AnswerCheck(asked, 512).take(msgspec.structs.replace(end, embedding=bytes(size)))
