# SPDX-License-Identifier: Apache-2.0
"""Logs and traces of a server process hold nothing of what clients say, whatever they send and whatever fails."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from pagoda.api.errors import as_api_error
from pagoda.api.routes import ROUTES
from pagoda.cli.server_process import READY_PREFIX
from pagoda.telemetry.logging import configure_logging

MARK = "xyzzyPLUGH7391"
_AT_ONCE = 16


def bodies() -> Iterator[bytes]:
    """Bodies that some route answers, and bodies that fail at each place where they may."""
    messages = [{"role": "user", "content": MARK}]
    few = {"model": "m", "max_tokens": 4}
    tool = {"type": "function", "function": {"name": "f", "description": MARK}}
    call = {"function": {"name": MARK, "arguments": MARK}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": [MARK]}}}
    broken = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {"pattern": f"({MARK}"}},
    }
    for body in (
        {"prompt": MARK},
        {"prompt": MARK, **few},
        {"prompt": [MARK, MARK], "stream": True, **few},
        {"prompt": MARK, "suffix": MARK, **few},
        {"prompt": MARK * 2000, **few},
        {"prompt": MARK, "temperature": MARK},
        {"prompt": {MARK: MARK}},
        {"prompt": MARK, MARK: MARK},
        {"prompt": MARK, "stop": [MARK] * 5000},
        {"prompt": MARK, "guided_regex": f"({MARK}", **few},
        {"prompt": MARK, "model": MARK},
        {"messages": messages},
        {"messages": messages, **few},
        {"messages": messages, "stream": True, **few},
        {"messages": messages, "tools": [tool], "tool_choice": "required", **few},
        {"messages": messages, "response_format": schema, **few},
        {"messages": messages, "response_format": broken, **few},
        {"messages": [{"role": MARK, "content": MARK}]},
        {"messages": [{"role": "user", "content": [{"type": MARK, "text": MARK}]}]},
        {"messages": [{"role": "user", "content": MARK + "\ud800"}], **few},
        {"messages": MARK},
        {
            "messages": [
                *messages,
                {
                    "role": "assistant",
                    "tool_calls": [call],
                },
            ]
        },
        {"system": MARK, "messages": messages, **few},
        {"input": MARK, "model": "m", "max_output_tokens": 16},
        {"input": [{"role": "user", "content": MARK}], "model": "m", "stream": True},
        {"input": MARK, "background": True, "model": "m"},
        {"input": MARK, "previous_response_id": MARK, "model": "m"},
        {"items": [{"type": "message", "role": "user", "content": MARK}]},
        {"text": MARK, "sampling_params": {"max_new_tokens": 4}},
        {"text_1": MARK, "text_2": [MARK], "model": "m"},
        {"query": MARK, "documents": [MARK], "model": "m"},
        {"content": MARK},
        {"input_prefix": MARK, "input_suffix": MARK, "n_predict": 4},
        {"level": MARK},
        {"lora_name": "a", "lora_path": MARK},
    ):
        yield json.dumps(body).encode()
    yield json.dumps({"messages": messages}).encode()[:-2]
    yield b'{"prompt": "' + MARK.encode() + b"\xff" + b'"}'
    yield MARK.encode()


async def ask_all(url: str) -> int:
    """Sends all bodies to all routes; returns the number of answers of status 200."""
    turns = asyncio.Semaphore(_AT_ONCE)
    form = f'--x\r\nContent-Disposition: form-data; name="file"; filename="{MARK}"\r\n\r\n{MARK}\r\n--x--\r\n'

    async def ask(session: aiohttp.ClientSession, path: str, body: bytes, kind: str) -> bool:
        headers = {"Content-Type": kind, "X-Session-ID": MARK}
        async with turns, session.post(path, data=body, headers=headers) as answer:
            await answer.read()
            return answer.status == 200

    paths = [path.replace("*", "x") for path, methods in ROUTES.items() if "POST" in methods]
    async with aiohttp.ClientSession(url) as session:
        asked = [
            ask(session, path, body, "application/json") for path in paths for body in bodies()
        ]
        asked += [
            ask(session, path, form.encode(), "multipart/form-data; boundary=x") for path in paths
        ]
        asked += [ask(session, f"/v1/models?{MARK}", b"", MARK)]
        return sum(await asyncio.gather(*asked))


def spellings() -> list[bytes]:
    plain = MARK.encode()
    return [
        plain,
        base64.b64encode(plain)[:-4],
        plain.hex().encode(),
        json.dumps(list(plain))[1:-1].encode(),
    ]


def test_no_log_and_no_trace_has_a_prompt(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pagoda", "serve", "--executor", "sim", "--port", "0"),
                *("--served-model-name", "m", "--log-level", "debug", "--sim-base-ms", "0"),
                *("--profile", "verbose", "--profile-dir", str(tmp_path / "trace")),
                *("--files-dir", str(tmp_path / "files"), "--max-model-len", "2048"),
            ],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith(READY_PREFIX))
            num_answered = asyncio.run(ask_all(line.removeprefix(READY_PREFIX).split()[0]))
            process.terminate()
            written = process.stdout.read()
            assert process.wait() == 0
        finally:
            process.kill()
    assert num_answered > 50
    logged = log.read_bytes()
    traces = [path.read_bytes() for path in (tmp_path / "trace").iterdir()]
    assert logged.count(b"\n") > 500
    assert sum(map(len, traces)) > 10_000
    for place, text in [
        ("log", logged),
        ("output", written.encode()),
        *(("trace", t) for t in traces),
    ]:
        for spelling in spellings():
            found = re.search(rb"[^\n]{0,200}" + re.escape(spelling), text)
            assert found is None, (place, found and found[0])


def test_an_error_of_ours_does_not_quote_the_client(capfd: Any) -> None:
    configure_logging("debug")
    try:
        try:
            int(MARK)
        except ValueError as error:
            raise KeyError(MARK) from error
    except KeyError as error:
        answer = as_api_error(error, "req-1")
    assert MARK not in answer.message
    logged = capfd.readouterr().err
    assert MARK not in logged
    assert "request failed" in logged
    assert "ValueError" in logged
    assert "KeyError" in logged
    assert "test_no_prompts_in_logs.py" in logged
