# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fragment_files import read_fragments

from pagoda.fleet.trace_control import TraceControl
from pagoda.telemetry.tracer import TraceLevel, Tracer


@pytest.fixture
async def traced(serve_api: Any, tmp_path: Path) -> Any:
    return with_control(await serve_api("hello"), tmp_path)


def with_control(api: Any, directory: Path, tracer: Tracer | None = None) -> Any:
    service, tracer = api.service, tracer or Tracer("frontend")
    service.tracing = TraceControl(tracer, [service.tracker], directory, "serve-1")
    return api


async def test_a_trace_is_started_and_stopped(traced: Any, tmp_path: Path) -> None:
    started = await traced.post("/profile/start", {"level": "verbose"})
    described = {"directory": str(tmp_path), "run": "serve-1", "level": "verbose"}
    assert (started.status, started.json()) == (200, described)
    assert (await traced.complete(stream=True, max_tokens=20)).status == 200
    stopped = await traced.post("/profile/stop")
    assert (stopped.status, stopped.json()) == (200, {**described, "problems": []})
    (fragment,) = read_fragments(tmp_path)
    assert len(fragment.named("request")) == 1
    assert len(fragment.named("token")) == 5


async def test_it_is_on_or_off_and_needs_no_body(traced: Any) -> None:
    off = await traced.request("POST", "/profile/stop")
    assert (off.status, off.error()["code"]) == (409, "no_profile")
    assert (await traced.request("POST", "/profile/start")).json()["level"] == "e2e"
    on = await traced.post("/profile/start", {"seconds": 3600})
    assert (on.status, on.error()["code"]) == (409, "profile_running")
    assert (await traced.request("POST", "/profile/stop")).status == 200


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        ({"num_steps": 0}, "num_steps", "num_steps"),
        ({"num_steps": 1.5}, "num_steps", "num_steps"),
        ({"seconds": 0}, "seconds", "seconds must be above 0 and at most 86400, got 0.0."),
        ({"seconds": -1}, "seconds", "seconds must be above 0"),
        ({"seconds": 1e9}, "seconds", "seconds must be above 0"),
        ({"seconds": 1, "num_steps": 1}, "num_steps", "num_steps and seconds exclude each other."),
        ({"level": "all"}, "level", "level"),
        ({"directory": "/etc"}, "directory", "directory is not a known field."),
    ],
)
async def test_what_cannot_be_asked_for(
    traced: Any, body: dict[str, Any], param: str, sentence: str
) -> None:
    refused = await traced.post("/profile/start", body)
    error = refused.error()
    assert (refused.status, error["param"]) == (400, param)
    assert sentence in error["message"]
    assert traced.service.tracing is not None
    assert traced.service.tracing.session is None


async def test_a_router_counts_no_steps(serve_api: Any, tmp_path: Path) -> None:
    api = with_control(await serve_api(), tmp_path)
    api.service.fleet = SimpleNamespace(is_router=True)
    refused = await api.post("/profile/start", {"num_steps": 5})
    assert refused.status == 400
    assert "a router, which computes no steps; give seconds." in refused.error()["message"]
    assert (await api.post("/profile/start", {"seconds": 5})).status == 200
    assert (await api.post("/profile/stop")).status == 200


async def test_a_directory_that_cannot_be_written_is_an_error_of_the_server(
    serve_api: Any, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("")
    api = with_control(await serve_api(), tmp_path / "taken")
    failed = await api.post("/profile/start", {})
    assert failed.status == 500
    assert failed.error()["message"].startswith("--profile-dir ")


async def test_stopping_says_what_went_wrong_before(serve_api: Any, tmp_path: Path) -> None:
    tracer = Tracer("frontend")
    api = with_control(await serve_api(), tmp_path, tracer)
    await api.service.tracing.start(TraceLevel.E2E)
    tracer.span("broken", 1, {"what": object()})
    stopped = (await api.post("/profile/stop")).json()
    assert "lacks an event" in stopped["problems"][0]
