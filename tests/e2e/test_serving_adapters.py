# SPDX-License-Identifier: Apache-2.0
"""Adapters over HTTP: chosen by the model's name, loaded and unloaded, and there again after deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from adapter_files import save_adapter_of
from streams import children

from pagoda import LLM, SamplingParams
from pagoda.checkpoints.resolve import load_model_config, resolve_model
from pagoda.cli.main import main
from pagoda.cli.server_process import ServerProcess, server_process
from pagoda.errors import InvalidRequestError

CONFIG = load_model_config(resolve_model(None).model, "auto")
MODEL = "pagoda-tiny"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three")):
        save_adapter_of(CONFIG, directory / "inside" / name, seed=seed, size=0.4)
    save_adapter_of(CONFIG, directory / "outside", seed=9, size=0.4)
    (directory / "inside" / "link").symlink_to(directory / "outside")
    wrong = save_adapter_of(CONFIG, directory / "inside" / "wrong")
    (wrong / "adapter_config.json").write_text("{")
    save_adapter_of(CONFIG, directory / "inside" / "high", rank=33)
    return directory


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[ServerProcess]:
    inside = directory / "inside"
    flags = [
        *("--lora", f"one={inside / 'one'}", "--lora", f"two={inside / 'two'}"),
        *("--allow-lora-loading", str(inside), "--max-lora-rank", "32"),
        *("--dtype", "float32", "--log-level", "warning"),
    ]
    with server_process(flags) as server:
        yield server


@pytest.fixture
async def session(server: ServerProcess) -> Any:
    async with aiohttp.ClientSession(server.base_url) as session:
        yield session


async def _text(session: aiohttp.ClientSession, model: str, prompt: str = "One and") -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    async with session.post("/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        assert answer["model"] == model
        text: str = answer["choices"][0]["text"]
        return text


async def _change(session: aiohttp.ClientSession, change: str, **body: Any) -> tuple[int, str]:
    async with session.post(f"/v1/{change}_lora_adapter", json=body) as response:
        return response.status, await response.text()


async def _names(session: aiohttp.ClientSession) -> list[str]:
    async with session.get("/v1/models") as response:
        return [model["id"] for model in (await response.json())["data"]]


async def test_models_are_listed(session: aiohttp.ClientSession, directory: Path) -> None:
    assert await _names(session) == [MODEL, "one", "two"]
    async with session.get("/v1/models/one") as response:
        model = await response.json()
    assert (model["id"], model["parent"]) == ("one", MODEL)
    assert model["root"] == str(directory / "inside" / "one")
    async with session.get("/v1/models/three") as response:
        assert response.status == 404


async def test_adapters_answer_by_name(session: aiohttp.ClientSession, plain_url: str) -> None:
    async with aiohttp.ClientSession(plain_url) as plain:
        expected = await _text(plain, MODEL)
    texts = {name: await _text(session, name) for name in (MODEL, "one", "two", MODEL, "one")}
    assert texts[MODEL] == expected
    assert len({*texts.values()}) == 3
    body = {"model": "three", "messages": [{"role": "user", "content": "hi"}]}
    async with session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "model_not_found"


async def test_adapters_come_and_go(session: aiohttp.ClientSession) -> None:
    status, text = await _change(session, "load", lora_name="new", lora_path="three")
    assert (status, text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert await _names(session) == [MODEL, "one", "two", "new"]
    first = await _text(session, "new")
    assert (await _change(session, "load", lora_name="new", lora_path="three"))[0] == 400
    assert (await _change(session, "unload", lora_name="new"))[0] == 200
    assert (await _change(session, "unload", lora_name="new"))[0] == 404
    assert await _names(session) == [MODEL, "one", "two"]
    # The same name with other weights shares no KV with what it was.
    assert (await _change(session, "load", lora_name="new", lora_path="two"))[0] == 200
    assert await _text(session, "new") == await _text(session, "two") != first
    assert (await _change(session, "unload", lora_name="new"))[0] == 200
    assert await _text(session, "two")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"lora_name": "x", "lora_path": "../outside"}, "must lie below"),
        ({"lora_name": "x", "lora_path": "link"}, "must lie below"),
        ({"lora_name": "x", "lora_path": "/etc"}, "must lie below"),
        ({"lora_name": "x", "lora_path": "a\0b"}, "must be the path"),
        ({"lora_name": "x", "lora_path": "none"}, "there is no adapter directory"),
        ({"lora_name": "x", "lora_path": "wrong"}, "is not valid JSON"),
        ({"lora_name": "x", "lora_path": "high"}, "is above the highest rank"),
        ({"lora_name": MODEL, "lora_path": "three"}, "is loaded already"),
        ({"lora_name": "one", "lora_path": "three"}, "is loaded already"),
        ({"lora_name": "", "lora_path": "three"}, "must have 1 to"),
        ({"lora_name": "x", "lora_path": "three", "load_inplace": True}, "is not supported"),
        ({"lora_name": "x"}, "lora_path"),
    ],
)
async def test_what_cannot_be_loaded(
    session: aiohttp.ClientSession, body: dict[str, Any], sentence: str
) -> None:
    status, text = await _change(session, "load", **body)
    assert status == 400, text
    assert sentence in text
    assert await _names(session) == [MODEL, "one", "two"]


async def test_adapters_outlive_workers_and_engines(
    session: aiohttp.ClientSession, server: ServerProcess
) -> None:
    assert (await _change(session, "load", lora_name="late", lora_path="three"))[0] == 200
    expected = {name: await _text(session, name) for name in (MODEL, "one", "two", "late")}
    for module in ("pagoda.worker.main", "pagoda.engine.main"):
        (process,) = children(server.pid, module)
        os.kill(process, signal.SIGKILL)
        assert {name: await _text(session, name) for name in expected} == expected
    assert (await _change(session, "unload", lora_name="late"))[0] == 200


async def test_a_server_that_does_not_allow_it(plain_url: str) -> None:
    async with aiohttp.ClientSession(plain_url) as session:
        status, text = await _change(session, "load", lora_name="x", lora_path="y")
        assert status == 403
        assert "--allow-lora-loading" in text
        assert (await _change(session, "unload", lora_name="x"))[0] == 403


def test_python_and_the_command_line(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = f"one={directory / 'inside' / 'one'}"
    prompt, greedy = "One and", SamplingParams(temperature=0, max_tokens=12)
    with LLM(lora=[one], dtype="float32") as llm:
        both = llm.generate([prompt, prompt], greedy, lora_request=["one", None])
        assert [out.outputs[0].text for out in llm.generate([prompt] * 2, greedy)] == [
            both[1].outputs[0].text
        ] * 2
        with pytest.raises(InvalidRequestError, match="lora_request names no adapter"):
            llm.generate([prompt], greedy, lora_request="two")
    adapted, plain = (out.outputs[0].text for out in both)
    assert adapted != plain
    flags = ["--raw", "--temperature", "0", "--max-tokens", "12", "--dtype", "float32"]
    assert main(["generate", prompt, *flags, "--lora", one]) == 0
    assert adapted.strip() in capfd.readouterr().out
    assert main(["generate", prompt, *flags, "--lora", f"bad={directory}"]) == 2
    assert "is no LoRA adapter: adapter_config.json cannot be read" in capfd.readouterr().err
    names = ["--served-model-name", "a", "--served-model-name", "one"]
    for taken in ([], names):
        own = one if taken else one.replace("one=", f"{MODEL}=", 1)
        assert main(["serve", "--lora", own, "--port", "0", *taken]) == 2
        assert "is the name of the model" in capfd.readouterr().err
