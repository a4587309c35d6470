"""Hosts join a router, answer for it, leave, fall silent; strangers are kept out. Over real sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq.asyncio
from scripted_endpoint import EOS, ScriptedEndpoint

from pagoda.engine.messages import (
    CurveKeys,
    FinishReason,
    GenerateRequest,
    HostJoin,
    SamplingParams,
)
from pagoda.errors import ConfigError
from pagoda.frontend.dispatcher import Dispatcher
from pagoda.frontend.host_link import HostDoor
from pagoda.frontend.policies import POLICIES
from pagoda.frontend.registry import Membership, Registry
from pagoda.ipc.curve import encrypt_client, keep_door, keys_of

KEYS = keys_of(b"a secret of all hosts and routers")
TTL_S = 0.4


class Router:
    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        keep_door(self.context, KEYS)
        self.dispatcher = Dispatcher([], POLICIES["round-robin"])
        self.registry = Registry(
            self.dispatcher,
            self.context,
            "tcp://127.0.0.1:*",
            KEYS,
            model="m",
            model_digest="1",
            ttl_s=TTL_S,
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.registry.port}"

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_hosts(self, count: int) -> None:
        await self.until(lambda: len(self.dispatcher.replicas) == count)

    async def ask(self, request_id: str) -> tuple[str, FinishReason | None]:
        sampling = SamplingParams(seed=1, max_tokens=20)
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=[65, 66],
            sampling=sampling,
            eos_token_ids=(EOS,),
        )
        tokens: list[int] = []
        async for chunk in self.dispatcher.generate(request):
            tokens += chunk.token_ids
            if chunk.finish_reason is not None:
                return bytes(token for token in tokens if token < 128).decode(), chunk.finish_reason
        raise ValueError("The stream has no end.")


class Host:
    """Joins when it is made."""

    def __init__(
        self, router: Router, answer: str = "ok", keys: CurveKeys = KEYS, **fields: object
    ) -> None:
        self.endpoint = ScriptedEndpoint(lambda request: answer[len(request.output_token_ids) :])
        self.context = zmq.asyncio.Context()
        keep_door(self.context, keys)
        self.door = HostDoor(self.endpoint, self.context, "tcp://127.0.0.1:*", keys)
        join = HostJoin(
            host_id=f"host-{id(self)}",
            address=f"tcp://127.0.0.1:{self.door.port}",
            model="m",
            model_digest="1",
        )
        self.membership = Membership(
            self.context, router.address, keys, msgspec.structs.replace(join, **fields)
        )

    async def close(self) -> None:
        await self.membership.close()
        await self.door.close()
        self.context.term()


@asynccontextmanager
async def routed() -> AsyncIterator[Router]:
    router = Router()
    try:
        yield router
    finally:
        await router.registry.close()
        await router.dispatcher.close()
        router.context.term()


@asynccontextmanager
async def joined(router: Router, answer: str = "ok", **fields: object) -> AsyncIterator[Host]:
    host = Host(router, answer, **fields)  # type: ignore[arg-type]
    try:
        yield host
    finally:
        await host.close()


async def test_a_host_answers_for_the_router() -> None:
    async with routed() as router, joined(router, "hello"):
        await router.registry.first_host()
        assert router.dispatcher.limits.summary == "scripted"
        assert await router.ask("r1") == ("hello", FinishReason.STOP)
        assert (await router.dispatcher.health()).ready


async def test_a_request_goes_on_elsewhere_when_its_host_hangs_up() -> None:
    async with routed() as router, joined(router, "abcdef") as second:
        first = Host(router, "abcdef")
        await router.until_hosts(2)
        for host in (first, second):
            host.endpoint.pause_after = 3
        asking = [asyncio.create_task(router.ask(f"r{index}")) for index in range(2)]
        await first.endpoint.paused.wait()
        await second.endpoint.paused.wait()
        await first.close()
        second.endpoint.go_on.set()
        assert await asyncio.gather(*asking) == [("abcdef", FinishReason.STOP)] * 2
        moved = second.endpoint.requests[-1]
        assert bytes(moved.output_token_ids) == b"abc"
        assert moved.returns
        assert len(router.dispatcher.replicas) == 1


async def test_a_host_that_falls_silent_is_let_go() -> None:
    async with routed() as router, joined(router) as host:
        await router.until_hosts(1)
        await host.membership.close()
        await router.until_hosts(0)
        assert not (await router.dispatcher.health()).ready


async def test_a_host_that_leaves_finishes_what_it_has_and_gets_nothing_new() -> None:
    async with routed() as router, joined(router, "old") as leaving:
        await router.until_hosts(1)
        leaving.endpoint.pause_after = 1
        asking = asyncio.create_task(router.ask("r1"))
        await leaving.endpoint.paused.wait()
        await leaving.membership.leave()
        async with joined(router, "new"):
            await router.until_hosts(2)
            await router.until(lambda: any(m.is_leaving for m in router.dispatcher._members))
            assert await router.ask("r2") == ("new", FinishReason.STOP)
            leaving.endpoint.go_on.set()
            assert await asking == ("old", FinishReason.STOP)


async def test_an_answer_that_nobody_wants_ends_at_the_host() -> None:
    async with routed() as router, joined(router, "abcdef") as host:
        await router.until_hosts(1)
        host.endpoint.pause_after = 2
        asking = asyncio.create_task(router.ask("r1"))
        await host.endpoint.paused.wait()
        asking.cancel()
        await asyncio.wait_for(host.endpoint.any_aborted.wait(), 20)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_digest": "2"}, "another model or another version of it"),
        ({"protocol_version": 1}, "install the same version of Pagoda on both"),
    ],
)
async def test_another_model_or_version_is_refused_with_the_reason(
    fields: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with routed() as router, joined(router, **fields):
        await router.until(lambda: reason in caplog.text)
        assert router.dispatcher.replicas == []


async def test_a_join_without_the_key_is_not_heard(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.frontend.registry.TTL_S", 0.2)
    caplog.set_level(logging.WARNING)
    async with routed() as router, joined(router, keys=keys_of(b"some other secret")):
        await router.until(lambda: "has another --cluster-key-file" in caplog.text)
        assert router.dispatcher.replicas == []


async def test_nonsense_is_ignored() -> None:
    async with routed() as router, joined(router, "hello"):
        await router.until_hosts(1)
        for address in (
            router.address,
            router.dispatcher.replicas[0].address.removeprefix("tcp://"),
        ):  # type: ignore[attr-defined]
            stranger = router.context.socket(zmq.DEALER)
            encrypt_client(stranger, KEYS)
            stranger.connect(f"tcp://{address}")
            await stranger.send(b"nonsense")
            stranger.close(linger=1000)
        assert await router.ask("r1") == ("hello", FinishReason.STOP)


async def test_an_address_that_is_taken_is_refused() -> None:
    async with routed() as router:
        with pytest.raises(ConfigError, match=r"--join-listen .* cannot be listened on"):
            Registry(
                router.dispatcher,
                router.context,
                f"tcp://{router.address}",
                KEYS,
                model="m",
                model_digest="1",
            )
