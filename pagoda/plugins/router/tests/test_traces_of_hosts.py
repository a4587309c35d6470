# SPDX-License-Identifier: Apache-2.0
"""A router that traces from its start: its hosts do, too, and what all write is one trace."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
from fragment_files import assert_nested, fragments_of, read_fragments
from ports import free_ports
from sim_hosts import (
    VOCAB_SIZE,
    ask,
    expected,
    join_config,
    router_process,
    write_key,
)

from pagoda.fleet.fleet import Fleet
from pagoda.fleet.trace_control import TraceControl
from pagoda.messages.engine_config import EngineConfig, SimConfig
from pagoda.messages.worker_config import WorkerConfig
from pagoda.plugins.trace.merge.merging import merge_into_file
from pagoda.plugins.trace.report.reporting import report_of
from pagoda.telemetry.request_tracker import RequestTracker
from pagoda.telemetry.tracer import Tracer


async def test_a_request_can_be_followed_from_the_router_to_the_engine(tmp_path: Path) -> None:
    key, tracer = write_key(tmp_path), Tracer("frontend")
    join = f"127.0.0.1:{free_ports(1)[0]}"
    tracker = RequestTracker()
    sim = SimConfig(base_s=0.002, vocab_size=VOCAB_SIZE)
    engine = EngineConfig(worker=WorkerConfig(model="sim"), executor="sim", sim=sim)
    entrance = join_config(join, key, tracker).entrance
    host = Fleet.of_engines(engine, entrance=entrance, tracer=tracer)
    control = TraceControl(tracer, [tracker], tmp_path / "host", "serve-1")
    control.join(host)
    await host.start()
    try:
        flags = ["--join-listen", join, "--cluster-key-file", str(key)]
        flags += ["--profile", "e2e", "--profile-dir", str(tmp_path / "router")]
        async with router_process(*flags) as router, aiohttp.ClientSession() as session:
            assert await ask(session, router.base_url, 7, 20) == expected(7, 20)
            async with asyncio.timeout(20):
                while not any(it.clocks for it in fragments_of(tmp_path / "host", "frontend")):
                    await asyncio.sleep(0.01)
        assert control.session is None
    finally:
        await host.close()
    assert len(read_fragments(tmp_path / "host")) == 2  # the host keeps its own
    (routed,) = fragments_of(tmp_path / "router", "router")
    (frontend,) = fragments_of(tmp_path / "router", "frontend")
    (engine,) = fragments_of(tmp_path / "router", "engine dp0")
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
    merged = merge_into_file([tmp_path / "router"])
    assert [it.header.kind for it in merged.trace.processes] == ["router", "frontend", "engine"]
    assert (merged.num_requests, merged.trace.notes) == (1, ())
    [report] = report_of(merged.trace).requests
    assert report.output_tokens == 20
    assert report.took["decode"] > 0
