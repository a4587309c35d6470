"""What a host says to a router, besides tokens. Over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq.asyncio

from pagoda.engine.config import EngineConfig
from pagoda.engine.messages import GenerateRequest, SamplingParams, SimConfig, WorkerConfig
from pagoda.frontend.dispatcher import Dispatcher
from pagoda.frontend.host_link import HostDoor, Identity, RemoteHost
from pagoda.frontend.policies import POLICIES
from pagoda.ipc.curve import keep_door, keys_of
from pagoda.sim.endpoint import SimEndpoint

KEYS = keys_of(b"a secret of all hosts and routers")
HOST = Identity("host", "m", "digest", is_router=False)
ROUTER = Identity("router", "m", "digest", is_router=True)


@asynccontextmanager
async def routed(config: EngineConfig) -> AsyncIterator[Dispatcher]:
    """A router's dispatcher over one host, whose own is over one engine."""
    context = zmq.asyncio.Context()
    keep_door(context, KEYS)
    host = Dispatcher([SimEndpoint(config)], POLICIES["round-robin"])
    await host.start()
    door = HostDoor(host, context, "tcp://127.0.0.1:*", KEYS, HOST)
    remote = RemoteHost(context, f"tcp://127.0.0.1:{door.port}", KEYS, ROUTER)
    router = Dispatcher([remote], POLICIES["round-robin"])
    try:
        await router.start()
        yield router
    finally:
        await router.close()
        await door.close()
        await host.close()
        context.term()


async def test_a_router_sees_how_far_a_prompt_is() -> None:
    config = EngineConfig(
        worker=WorkerConfig(model="sim"),
        executor="sim",
        sim=SimConfig(base_s=0.001, vocab_size=100),
        max_num_batched_tokens=32,
    )
    request = GenerateRequest(
        request_id="r",
        prompt_token_ids=list(range(100)),
        sampling=SamplingParams(seed=1, max_tokens=2),
    )
    async with routed(config) as router:
        seen = [
            (chunk.num_computed_tokens, router.ledger.pending_tokens[0])
            async for chunk in router.generate(request)
            if chunk.is_news
        ]
        assert seen == [(32, 68 + 2), (64, 36 + 2), (96, 4 + 2)]
        assert router.ledger.pending_tokens == [0]
