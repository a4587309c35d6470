# SPDX-License-Identifier: Apache-2.0
"""`pagoda generate`: answers to prompts of the command line, or to the lines of an OpenAI batch file.

A batch file has one request a line; the results have one response a line, in the same order:

in   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
out  {"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}},
      "error": null}
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter
from rich.style import Style

from pagoda.cli import output
from pagoda.cli.answer import ask
from pagoda.cli.files import read_jsonl
from pagoda.cli.local_server import Connection, connect
from pagoda.cli.openai_client import PATHS, ClientChoice
from pagoda.cli.options import (
    AnswerOptions,
    ConstraintOptions,
    Count,
    GeneralOptions,
    ProfileOptions,
    SamplingOptions,
)
from pagoda.cli.progress import progress
from pagoda.concurrency.loop_thread import LoopThread
from pagoda.errors import ConfigError
from pagoda.llm.engine_options import EngineOptions, ParallelOptions


def generate(
    *prompts: str,
    model: Annotated[str | None, Parameter(name=["--model", "-m"])] = None,
    raw: bool = False,
    input_file: Annotated[Path | None, Parameter(name="--input")] = None,
    output_file: Annotated[Path | None, Parameter(name="--output")] = None,
    concurrency: Count = 64,
    sampling: SamplingOptions = SamplingOptions(),
    answer: AnswerOptions = AnswerOptions(),
    constraint: ConstraintOptions = ConstraintOptions(),
    engine: EngineOptions = EngineOptions(),
    parallel: ParallelOptions = ParallelOptions(),
    profile: ProfileOptions = ProfileOptions(),
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Answer prompts, or all requests of an OpenAI batch file.

    Args:
        prompts: Prompts to answer; by default standard input is one.
        model: A model directory, GGUF file, hub id, smollm2 or preset; by default the embedded model.
        raw: Continue the prompt as it stands, instead of putting it into the chat template.
        input_file: A JSONL file of requests in OpenAI's batch format.
        output_file: The file for the results of --input, in the same order.
        concurrency: Requests of --input under way at once.
    """
    general.apply()
    connecting = connect(model, None, None, engine, parallel, profile=profile)
    if input_file is not None or output_file is not None:
        if input_file is None or output_file is None or prompts:
            raise ConfigError("--input and --output go together, and without prompts.")
        return _generate_batch(input_file, output_file, concurrency, connecting, parallel)
    parallel.check_prompts_at_once(1)
    texts = prompts or (_read_prompt(),)
    body = {**sampling.body(), **answer.body(engine.seed), **constraint.body()}
    with connecting as (thread, connection):
        for text in texts:
            if len(texts) > 1:
                output.stdout().print(f"> {text}", style=Style(bold=True))
            thread.run(_print_answer(connection, text, body, raw=raw))
    return 0


def _read_prompt() -> str:
    prompt = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    if not prompt:
        raise ConfigError("Give a prompt, pipe one in, or name a batch file with --input.")
    return prompt


async def _print_answer(
    connection: Connection, text: str, sampling: dict[str, object], *, raw: bool
) -> None:
    prompt = {"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}
    body = {"model": connection.model, **prompt, **sampling}
    await ask(connection.client, PATHS["completions" if raw else "chat"], body, _print_text)
    output.write_answer("\n")


def _print_text(choice: ClientChoice) -> None:
    delta = choice.delta.content if choice.delta is not None else None
    output.write_answer(choice.text or delta or "")


BATCH_URLS = (
    *PATHS.values(),
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)
"""Routes that lines of a batch file may ask."""


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, object]
    method: Literal["POST"] = "POST"


def read_batch(path: Path) -> list[BatchRequest]:
    """All requests of a batch file.

    Raises ConfigError if the file cannot be read, or a line, which the error names, is not a request.
    """
    requests: dict[str, BatchRequest] = {}
    for place, request in read_jsonl(path, BatchRequest, "--input"):
        if request.body.get("stream"):
            raise ConfigError(f"{place}: a batch request cannot be a stream.")
        if request.body.get("background"):
            raise ConfigError(f"{place}: a batch request cannot run in the background.")
        if request.custom_id in requests:
            raise ConfigError(f"{place}: custom_id {request.custom_id} is used twice.")
        requests[request.custom_id] = request
    if not requests:
        raise ConfigError(f"--input: {path} holds no request.")
    return list(requests.values())


async def answer_batch(
    connection: Connection, requests: Sequence[BatchRequest], concurrency: int
) -> AsyncGenerator[tuple[int, dict[str, object]], None]:
    """Statuses and output lines in the order of the requests, `concurrency` under way at a time.

    Requests that name no model are sent to the connection's. A line whose `url` is not in `BATCH_URLS` is
    answered with an error, and has status 404.
    """
    room = asyncio.Semaphore(concurrency)

    async def answer(request: BatchRequest) -> tuple[int, dict[str, object]]:
        line: dict[str, object] = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": request.custom_id,
        }
        if request.url not in BATCH_URLS:
            advance()
            message = f"url must be one of {', '.join(BATCH_URLS)}, got {request.url}."
            error = {"code": "invalid_url", "message": message}
            return 404, {**line, "response": None, "error": error}
        body = {"model": connection.model, **request.body}
        async with room:
            status, data = await connection.client.post_raw(request.url, body)
        advance()
        response = {
            "status_code": status,
            "request_id": f"req_{uuid.uuid4().hex}",
            "body": msgspec.Raw(data),
        }
        return status, {**line, "response": response, "error": None}

    with progress("requests", len(requests)) as advance:
        tasks = [asyncio.create_task(answer(request)) for request in requests]
        try:
            for task in tasks:
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _generate_batch(
    source: Path,
    target: Path,
    concurrency: int,
    connecting: AbstractContextManager[tuple[LoopThread, Connection]],
    parallel: ParallelOptions,
) -> int:
    requests = read_batch(source)
    parallel.check_prompts_at_once(min(concurrency, len(requests)))
    try:
        file = target.open("wb")
    except OSError as error:
        raise ConfigError(f"--output: cannot write {target}: {error.strerror}.") from error
    with file, connecting as (thread, connection):
        num_failed = thread.run(_write_results(connection, requests, concurrency, file.write))
    output.stderr().print(
        f"{len(requests) - num_failed} of {len(requests)} requests answered, results in {target}"
    )
    return 1 if num_failed else 0


async def _write_results(
    connection: Connection,
    requests: Sequence[BatchRequest],
    concurrency: int,
    write: Callable[[bytes], object],
) -> int:
    """Returns the number of requests that failed."""
    num_failed = 0
    async with aclosing(answer_batch(connection, requests, concurrency)) as results:
        async for status, result in results:
            write(msgspec.json.encode(result) + b"\n")
            num_failed += status != 200
    return num_failed
