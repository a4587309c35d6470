"""A router and a host that trace: each by itself, and what they write fits together."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import aiohttp
from fragment_files import assert_nested, fragments_of, read_fragments
from sim_hosts import VOCAB_SIZE, ask, expected, router_process, write_key

from pagoda.checkpoints.fingerprint import model_digest
from pagoda.checkpoints.resolve import resolve_model
from pagoda.engine.config import EngineConfig, SimConfig
from pagoda.frontend.discovery.addresses import Advertised
from pagoda.frontend.discovery.flags import registering
from pagoda.frontend.fleet import Fleet, JoinConfig, read_cluster_key
from pagoda.frontend.request_tracker import RequestTracker
from pagoda.frontend.trace_control import TraceControl
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import TraceLevel, Tracer


def make_host(join: str, key: Path, tracer: Tracer, tracker: RequestTracker) -> Fleet:
    """With an engine process whose tokens are made up."""
    sim = SimConfig(base_s=0.002, vocab_size=VOCAB_SIZE)
    engine = EngineConfig(worker=WorkerConfig(model="sim"), executor="sim", sim=sim)
    files, keys = resolve_model(None), read_cluster_key(key)
    joins = JoinConfig(
        register=registering(join, keys),
        keys=keys,
        advertised=Advertised("127.0.0.1", None),
        model=files.served_name,
        model_digest=model_digest(files),
        tracker=tracker,
    )
    return Fleet.of_engines(engine, join=joins, tracer=tracer)


async def test_a_request_can_be_followed_from_the_router_to_the_engine(tmp_path: Path) -> None:
    key, tracer = write_key(tmp_path), Tracer("frontend")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        join = f"127.0.0.1:{free.getsockname()[1]}"
    tracker = RequestTracker()
    host = make_host(join, key, tracer, tracker)
    control = TraceControl(tracer, [tracker], tmp_path / "host", "serve-1")
    control.join(host)
    await host.start()
    try:
        flags = ["--join-listen", join, "--cluster-key-file", str(key)]
        flags += ["--profile", "e2e", "--profile-dir", str(tmp_path / "router")]
        async with router_process(*flags) as router, aiohttp.ClientSession() as session:
            await control.start(TraceLevel.E2E)
            assert await ask(session, router.base_url, 7, 20) == expected(7, 20)
            async with asyncio.timeout(20):
                while not any(it.clocks for it in fragments_of(tmp_path / "host", "frontend")):
                    await asyncio.sleep(0.01)
            assert (await control.stop()).problems == []
    finally:
        await host.close()
    (routed,) = read_fragments(tmp_path / "router")
    (frontend,) = fragments_of(tmp_path / "host", "frontend")
    (engine,) = fragments_of(tmp_path / "host", "engine dp0")
    for fragment in (routed, frontend, engine):
        assert_nested(fragment)
    assert routed.header.role == "router"
    (answer,), (request,) = routed.named("request"), engine.named("request")
    assert answer["args"]["request"] == request["args"]["request"]
    (passed_on,) = frontend.named("request")
    assert passed_on["args"]["request"] == answer["args"]["request"]
    assert sum(event["args"]["chunks"] for event in routed.named("chunks")) >= 20
    assert [clock["peer"] for clock in frontend.clocks] == [routed.header.uid]
    assert engine.header.parent_uid == frontend.header.uid
