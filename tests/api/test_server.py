# SPDX-License-Identifier: Apache-2.0
"""A real server process with the simulated executor, and the official client."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import openai
import psutil
import pytest
from fragment_files import assert_nested, end_of, read_fragments
from scripted_endpoint import ScriptedEndpoint

from pagoda.api.server import ServerConfig, serve
from pagoda.api.service import ApiConfig
from pagoda.cli.server_process import ServerProcess, server_process
from pagoda.errors import ConfigError, EngineDeadError
from pagoda.faults.injector import Faults
from pagoda.fleet.adapters import AdapterRegistry
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.fleet import Fleet
from pagoda.messages.engine_config import EngineConfig, SimConfig
from pagoda.messages.frontend import EngineReady
from pagoda.messages.tracing import StartTrace
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.fragments import FRAGMENT_SUFFIX, clear_fragments, run_prefix
from pagoda.telemetry.tracer import ProfileConfig, TraceLevel, Tracer
from pagoda.text.model_text import synthetic_model_text

SIM = ["qwen3-0.6b", "--load-format", "dummy", "--executor", "sim"]
USER = [{"role": "user", "content": "Hello"}]


def completion(client: Any, model: str = "qwen3-0.6b", prompt: str = "x", **options: Any) -> Any:
    """A stream of as many tokens as are asked for."""
    options = {"stream": True, "extra_body": {"ignore_eos": True}, **options}
    return client.completions.create(model=model, prompt=prompt, **options)


@contextmanager
def simulated_server(*flags: str) -> Iterator[tuple[ServerProcess, openai.OpenAI]]:
    with (
        server_process([*SIM, *flags]) as process,
        openai.OpenAI(base_url=f"{process.base_url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield process, client


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process([*SIM, "--api-key", "secret", "--served-model-name", "sim"]) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="secret", max_retries=0) as opened:
        yield opened


def test_chat_in_one_piece_and_as_a_stream(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "sim", "messages": USER, "seed": 7, "max_tokens": 20}
    options["extra_body"] = {"ignore_eos": True}
    whole = client.chat.completions.create(**options)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    [choice] = whole.choices
    assert choice.finish_reason == "length"
    text, usage = "", None
    options["stream_options"] = {"include_usage": True}
    for chunk in client.chat.completions.create(**options, stream=True):
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == choice.message.content
    assert usage is not None
    assert usage.total_tokens == whole.usage.total_tokens


def test_completions(client: openai.OpenAI) -> None:
    options = {"model": "sim", "prompt": ["a", "b"], "seed": 7, "n": 2, "logprobs": 1}
    whole = client.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert all(len(choice.logprobs.tokens) == 16 for choice in whole.choices if choice.logprobs)
    texts = [""] * 4
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_a_beam_search(client: openai.OpenAI) -> None:
    beams = {"use_beam_search": True, "best_of": 4, "return_tokens_as_token_ids": True}
    answer = client.completions.create(
        model="sim", prompt=["a", "b"], n=3, logprobs=5, max_tokens=6, extra_body=beams
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    reports = [choice.logprobs for choice in answer.choices if choice.logprobs]
    assert len({tuple(report.tokens or ()) for report in reports[:3]}) == 3
    for report in reports:
        assert {len(top) for top in report.top_logprobs or ()} == {5}


def test_models_and_errors_as_the_client_raises_them(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["sim"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="sim", messages=USER, temperature=9000)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_a_client_that_goes_away_leaves_nothing_behind(client: openai.OpenAI) -> None:
    stream = completion(client, "sim", max_tokens=100_000)
    next(iter(stream))
    stream.close()
    while client.get("/load", cast_to=dict)["num_running"]:
        pass


@pytest.mark.parametrize(
    ("drain_timeout", "max_tokens", "second_signal", "reason"),
    [("60", 60, False, "length"), ("0.2", 10**4, False, "abort"), ("600", 10**4, True, "abort")],
)
def test_a_signal_lets_answers_end_in_good_order(
    drain_timeout: str, max_tokens: int, second_signal: bool, reason: str
) -> None:
    flags = ("--sim-base-ms", "20", "--drain-timeout", drain_timeout)
    with simulated_server(*flags) as (process, client):
        chunks = iter(completion(client, max_tokens=max_tokens))
        next(chunks)
        os.kill(process.pid, signal.SIGTERM)
        if second_signal:
            next(chunks)
            os.kill(process.pid, signal.SIGINT)
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == reason
    assert reason == "abort" or len(reasons) == max_tokens - 1


def simulated_fleet() -> Fleet:
    worker = WorkerConfig(model="qwen3-0.6b", load_format="dummy")
    return Fleet.of_engines(EngineConfig(worker=worker, executor="sim", sim=SimConfig()))


async def serve_simulated(
    make_fleet: Callable[[], Fleet] = simulated_fleet,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    on_ready: Callable[[str, EngineReady], None] = lambda *_: None,
    profile: ProfileConfig | None = None,
) -> None:
    await serve(
        ServerConfig(ApiConfig("m"), host, port),
        make_fleet,
        synthetic_model_text,
        on_ready=on_ready,
        profile=profile or ProfileConfig(),
        tracer=Tracer("frontend"),
    )


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
async def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(ConfigError, match="choose another --host or --port"):
        await serve_simulated(host=host)


class DoomedFleet(ScriptedEndpoint):
    """Starts, and is then given up. It is its own dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = AdapterRegistry()
        self.faults = Faults(None)
        self.closed = False

    @property
    def dispatcher(self) -> Dispatcher:
        return cast(Dispatcher, self)

    async def start(self) -> None:
        pass

    async def leave(self) -> None:
        pass

    async def wait_failed(self) -> EngineDeadError:
        return EngineDeadError("The engine died too often.")

    async def close(self) -> None:
        self.closed = True


async def test_a_server_ends_with_its_engine() -> None:
    fleet = DoomedFleet()
    ready: list[str] = []
    with pytest.raises(EngineDeadError, match="died too often"):
        await serve_simulated(lambda: fleet, on_ready=lambda url, _: ready.append(url))
    assert fleet.closed
    [url] = ready
    with socket.socket() as again, pytest.raises(ConnectionRefusedError):
        again.connect(("127.0.0.1", int(url.rpartition(":")[2])))


# ---- several replicas


def test_streams_of_two_replicas_survive_the_death_of_an_engine() -> None:
    """One of two engines is killed while a hundred streams come from both."""
    options = ["--dp", "2", "--sim-base-ms", "10", "--max-num-waiting", "1000"]
    with server_process([*SIM, *options]) as process:
        texts, engines = asyncio.run(_many_streams(process, kill=True))
        again, _ = asyncio.run(_many_streams(process, kill=False))
        assert texts == again
        assert len(engines) == 2


async def _many_streams(process: ServerProcess, *, kill: bool) -> tuple[list[str], list[int]]:
    engines = [child.pid for child in psutil.Process(process.pid).children()]
    async with openai.AsyncOpenAI(
        base_url=f"{process.base_url}/v1", api_key="x", max_retries=0
    ) as client:
        num_begun = 0

        async def ask(seed: int) -> str:
            nonlocal num_begun
            stream = await completion(client, prompt=f"prompt {seed}", seed=seed, max_tokens=100)
            texts = []
            async for chunk in stream:
                if not texts:
                    num_begun += 1
                    if kill and num_begun == 60:  # one engine has 50 of them
                        os.kill(engines[0], signal.SIGKILL)
                texts.append(chunk.choices[0].text)
            assert chunk.choices[0].finish_reason == "length"
            return "".join(texts)

        return await asyncio.gather(*map(ask, range(100))), engines


def test_the_load_of_each_replica_and_where_sessions_go() -> None:
    options = ["--dp", "3", "--data-parallel-policy", "session-affinity"]
    with simulated_server(*options) as (_, client):

        def prompts() -> list[int]:
            load = client.get("/load", cast_to=dict)
            assert load["num_prompt_tokens"] == sum(
                replica["num_prompt_tokens"] for replica in load["replicas"]
            )
            return [replica["num_prompt_tokens"] for replica in load["replicas"]]

        def ask(**fields: object) -> None:
            client.completions.create(model="qwen3-0.6b", prompt="x", max_tokens=1, **fields)  # type: ignore[call-overload]

        for _ in range(4):
            ask(extra_headers={"X-Session-ID": "a"}, user="other")
            ask(extra_body={"prompt_cache_key": "a"}, user="other")
            ask(user="a")
        assert sorted(prompts()) == [0, 0, 12]
        for _ in range(3):
            ask()
        assert min(prompts()) > 0
        before = prompts()
        for rank, count in enumerate((5, 2, 3)):
            for _ in range(count):
                ask(extra_headers={"X-data-parallel-rank": str(rank)}, user="a")
        assert [now - then for now, then in zip(prompts(), before, strict=True)] == [5, 2, 3]
        for wrong in ("3", "-1", "1.0", "x", "99999999999999999999", ""):
            with pytest.raises(openai.BadRequestError, match="from 0 to 2, got") as refused:
                ask(extra_headers={"X-data-parallel-rank": wrong})
            assert refused.value.param == "X-data-parallel-rank"


def test_one_prompt_for_two_replicas_is_refused_before_anything_starts() -> None:
    for command in (["generate", "hi"], ["chat"]):
        done = subprocess.run(
            [sys.executable, "-m", "pagoda", *command, "--dp", "2"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )
        assert done.returncode == 2
        assert "--data-parallel-size 2 is of no use for one prompt at a time" in done.stderr


# ---- traces


async def test_a_directory_of_traces_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    profile = ProfileConfig(tmp_path / "taken", TraceLevel.E2E)
    with pytest.raises(
        ConfigError, match=r"^--profile-dir .*taken cannot be written \(File exists"
    ):
        await serve_simulated(profile=profile)


async def test_a_server_whose_port_is_taken_leaves_the_traces_of_the_other(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = f"frontend-{socket.gethostname()}-127.0.0.1-{port}"
        fragment = tmp_path / f"{run_prefix(run)}frontend.0.0{FRAGMENT_SUFFIX}"
        fragment.write_text("of the other")
        profile = ProfileConfig(tmp_path, TraceLevel.E2E)
        with pytest.raises(ConfigError, match="cannot listen"):
            await serve_simulated(port=port, profile=profile)
    assert list(tmp_path.iterdir()) == [fragment]
    clear_fragments(tmp_path, run)  # it is what a server there would remove
    assert not fragment.exists()


class TracedFleet(DoomedFleet):
    """Never closes its fragments."""

    def start_trace(self, order: StartTrace) -> None:
        pass

    async def stop_trace(self) -> list[str]:
        self.signal_again()
        await asyncio.Event().wait()
        return []

    def signal_again(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)


async def test_a_second_signal_does_not_wait_for_the_trace(tmp_path: Path) -> None:
    fleet = TracedFleet()
    profile = ProfileConfig(tmp_path, TraceLevel.E2E)
    async with asyncio.timeout(20):
        with pytest.raises(EngineDeadError):
            await serve_simulated(lambda: fleet, profile=profile)
    assert fleet.closed


def test_a_server_is_traced_from_its_start_to_its_last_answer(tmp_path: Path) -> None:
    flags = ["--profile", "e2e", "--profile-dir", str(tmp_path / "t"), "--sim-base-ms", "20"]
    with simulated_server(*flags) as (process, client):
        chunks = iter(completion(client, max_tokens=9, extra_headers={"X-Request-Id": "mine"}))
        next(chunks)
        os.kill(process.pid, signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    fragments = read_fragments(tmp_path / "t")
    assert [fragment.header.role for fragment in fragments] == ["frontend", "engine dp0"]
    frontend, engine = fragments
    for fragment in fragments:
        assert_nested(fragment)
        assert not fragment.is_cut
        assert fragment.header.run == f"frontend-{frontend.header.host}-{frontend.header.uid}"
    assert len(engine.named("worker ready")) == 1
    (answer,), (request,) = frontend.named("request"), engine.named("request")
    assert answer["args"]["request"] == request["args"]["request"]
    assert request["args"]["request"].startswith("mine-")
    assert answer["args"]["output_tokens"] == request["args"]["output_tokens"] == 9
    # On one host all processes have the same clock, so what is within what can be seen.
    (first,) = frontend.named("first token")
    assert answer["ts"] < request["ts"] < end_of(first) < end_of(request) < end_of(answer)
