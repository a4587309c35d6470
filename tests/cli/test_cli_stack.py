# SPDX-License-Identifier: Apache-2.0
"""Commands against the whole stack: a real server process, a real engine, a tiny model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pagoda.cli.serve import curl_line
from pagoda.cli.server_process import ServerProcess, server_process
from pagoda.plugins.trace.merge.chrome import read_chrome_trace

DUMMY = "--load-format dummy --threads 1 --kv-cache-memory-bytes 4MiB"


@pytest.fixture(scope="module")
def sim_server(shared_server: Callable[..., ServerProcess]) -> ServerProcess:
    return shared_server("--executor", "sim", "--log-level", "warning")


def request_rows(directory: Path) -> set[str]:
    """The requests that a merged trace of a frontend and an engine, or more, shows in both of them."""
    trace = read_chrome_trace(directory / "trace.json")
    kinds = [process.header.kind for process in trace.processes]
    assert kinds[:2] == ["frontend", "engine"]
    front, engine = ({row.request for row in it.rows} - {None} for it in trace.processes[:2])
    assert front == engine
    return front


def _pagoda(
    command: str, *arguments: str | Path, stdin: str = "", code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a command, which must end with the exit code `code` and without a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "pagoda", *command.split(), *map(str, arguments)],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=100,
        env={**os.environ, "PAGODA_LOG_LEVEL": "warning"},
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


# ---- serve


def test_the_start_up_summary_fits_one_screen_and_ends_with_a_curl_line() -> None:
    arguments = ["serve", "--port", "0", "--executor", "sim", "--api-key", "k"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pagoda", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if line.startswith("curl "):
            break
    process.terminate()
    assert process.wait(30) == 0
    process.stdout.close()
    assert len(lines) <= 12
    assert any(line.startswith("model     synthetic") for line in lines)
    assert any("131,072 tokens in 8,192 blocks of 16" in line for line in lines)
    assert any(line.startswith("ready: http://127.0.0.1:") for line in lines)
    assert '-H "Authorization: Bearer $PAGODA_API_KEY"' in lines[-1]
    assert "Bearer k" not in lines[-1]


def test_the_curl_line_of_a_model_that_hears_sends_a_file() -> None:
    line = curl_line("http://127.0.0.1:1", "w", asks_for_key=True, hears=True)
    assert line.startswith("curl http://127.0.0.1:1/v1/audio/transcriptions -H ")
    assert line.endswith(" -F file=@audio.mp3")


def test_the_curl_line_of_a_model_that_reads_sends_a_prompt() -> None:
    line = curl_line("http://127.0.0.1:1", "t", asks_for_key=False, reads=True)
    assert line.startswith("curl http://127.0.0.1:1/v1/completions -H ")
    assert '"prompt": ' in line


def test_the_curl_line_is_quoted_for_the_shell() -> None:
    line = curl_line("http://127.0.0.1:1", "it's", asks_for_key=False)
    printed = subprocess.run(
        ["/bin/sh", "-c", line.replace("curl", "printf '%s\\n'", 1)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert printed[0] == "http://127.0.0.1:1/v1/chat/completions"
    assert json.loads(printed[-1])["model"] == "it's"


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = _pagoda(f"serve --executor sim --port {port}", code=2)
    assert f"127.0.0.1:{port}" in done.stderr


def test_too_little_memory_for_one_sequence_is_one_sentence(dummy_model: Path) -> None:
    done = _pagoda("serve --port 0 --load-format dummy --num-kv-blocks 1", dummy_model, code=2)
    assert "--max-model-len" in done.stderr


def test_torch_is_in_the_worker_only(dummy_model: Path) -> None:
    with server_process([str(dummy_model), *DUMMY.split(), "--log-level", "warning"]) as server:
        frontend = psutil.Process(server.pid)
        # Others, such as one that converts a tokenizer, come and go.
        [engine] = (it for it in frontend.children() if "pagoda.engine.main" in it.cmdline())
        [worker] = (it for it in engine.children() if "pagoda.worker.main" in it.cmdline())
        with_torch = [
            "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
            for process in (frontend, engine, worker)
        ]
    assert with_torch == [False, False, True]
    # Its parent has ended first: it is gone once init has waited for it.
    assert not psutil.wait_procs([worker], timeout=60)[1]


# ---- bench


def test_bench_serve_measures_a_server(sim_server: ServerProcess, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = _pagoda(
        f"bench serve --base-url {sim_server.base_url} --num-prompts 12 --concurrency 4",
        *["--random-output-len", "9", "--output", figures],
        *["--goodput", "ttft:60000", "tpot:60000"],
    )
    assert "12 completed, 0 failed" in done.stdout
    assert "time to first token (TTFT)" in done.stdout
    record = json.loads(figures.read_text())
    report = record["report"]
    assert report["output_tokens"] == 12 * 9
    assert report["prompt_tokens"] == 12 * 256
    assert report["goodput"] == pytest.approx(report["request_rate"])
    assert record["load"]["request_rate"] is None
    assert "sampling greedy" in " ".join(done.stdout.split())
    assert (record["sampling"]["temperature"], record["sampling"]["top_k"]) == (0.0, -1)
    assert set(report["ttft_ms"]) == {"mean", "median", "p90", "p99"}


def test_bench_serve_without_streams(sim_server: ServerProcess, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = f"bench serve --base-url {sim_server.base_url} --num-prompts 5 --no-stream"
    done = _pagoda(f"{command} --random-output-len 9 --goodput e2el:60000 --output", figures)
    assert "5 completed, 0 failed" in done.stdout
    report = json.loads(figures.read_text())["report"]
    assert (report["output_tokens"], report["output_events"]) == (45, 0)
    assert report["prompt_tokens"] == 5 * 256
    assert report["goodput"] == pytest.approx(report["request_rate"])
    assert report["ttft_ms"]["mean"] is None
    assert report["e2e_ms"]["mean"] > 0
    done = _pagoda(f"{command} --goodput ttft:5", code=2)
    assert "--goodput takes e2el alone with --no-stream" in done.stderr


def test_bench_serve_asks_chat_questions_at_a_rate(
    sim_server: ServerProcess, tmp_path: Path
) -> None:
    dataset = tmp_path / "questions.jsonl"
    messages = [{"role": "user", "content": "hello"}]
    dataset.write_text(json.dumps({"messages": messages, "max_tokens": 5}) + "\n")
    done = _pagoda(
        f"bench serve --base-url {sim_server.base_url} --num-prompts 6 --request-rate 500",
        *["--dataset", "jsonl", "--dataset-path", dataset],
    )
    assert "6 completed, 0 failed" in done.stdout


def test_bench_serve_says_why_requests_failed(sim_server: ServerProcess) -> None:
    load = "--num-prompts 3 --num-warmups 0 --model another"
    done = _pagoda(f"bench serve --base-url {sim_server.base_url} {load}", code=1)
    assert "3 failed: The server answered with status 404" in done.stderr


@pytest.mark.parametrize(
    ("address", "sentence"),
    [(None, "status 404"), ("http://127.0.0.1:1", "Cannot reach a server at http://127.0.0.1:1")],
)
def test_bench_serve_tries_one_request_before_the_load(
    address: str | None, sentence: str, sim_server: ServerProcess
) -> None:
    base_url = address or sim_server.base_url
    done = _pagoda(f"bench serve --base-url {base_url} --model another", code=2)
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert sentence in line


def test_bench_offline_needs_no_server(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    load = f"--num-prompts 10 --input-len 5 --prefix-len 32 --output-len 7 --profile-dir {tmp_path}"
    done = _pagoda(f"bench offline --executor sim --profile e2e {load} --output", figures)
    record = json.loads(figures.read_text())
    assert record["output_tokens"] == 70
    assert record["prompt_tokens"] == 370
    assert "output throughput" in done.stdout
    assert "trace.json" in done.stderr
    assert len(request_rows(tmp_path)) == 10


def test_bench_accuracy_counts_right_answers(sim_server: ServerProcess, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    lines = [
        {
            "id": f"{skill}-1",
            "skill": skill,
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 4,
            "expect": {"contains": wanted},
        }
        for skill, wanted in (("easy", ""), ("hard", "a text that no dice would roll"))
    ]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = tmp_path / "figures.json"
    command = f"bench accuracy --base-url {sim_server.base_url} --questions {questions}"
    _pagoda(f"{command} --fail-under 0.5 --output", figures)
    record = json.loads(figures.read_text())
    assert record["accuracy"] == 0.5
    assert record["skills"] == {"easy": 1.0, "hard": 0.0}
    assert [answer["correct"] for answer in record["answers"]] == [True, False]
    _pagoda(f"{command} --fail-under 0.6", code=1)
    _pagoda(f"{command} --skill easy --fail-under 1")


# ---- generate and chat


def test_generate_answers_prompts_in_order(dummy_model: Path, tmp_path: Path) -> None:
    command = f"generate --model {dummy_model} {DUMMY} --seed 1 --max-tokens 6"
    both = _pagoda(f"{command} --profile kernel --profile-dir {tmp_path}", "one", "two")
    assert len(request_rows(tmp_path)) == 2
    _, _, worker = read_chrome_trace(tmp_path / "trace.json").processes
    assert worker.description("forward_ops", object)
    assert both.stdout.startswith("> one\n")
    assert "\n> two\n" in both.stdout
    again = _pagoda(command, stdin="one")
    assert again.stdout in both.stdout


def test_generate_holds_answers_to_a_constraint() -> None:
    done = _pagoda("generate --raw --choice north --choice south", "Go")
    assert done.stdout.strip() in ("north", "south")
    done = _pagoda("generate --raw --regex (", "Go", code=2)
    assert "the regular expression" in done.stderr


def test_generate_answers_a_batch_file(dummy_model: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        {
            "custom_id": "chat",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": messages, "max_tokens": 3},
        },
        {"custom_id": "bad", "url": "/v1/completions", "body": {"prompt": "x", "n": -1}},
        {"custom_id": "text", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}},
        {"custom_id": "other", "url": "/v1/files", "body": {}},
        {
            "custom_id": "response",
            "url": "/v1/responses",
            "body": {"input": "hi", "max_output_tokens": 16},
        },
        {"custom_id": "vector", "url": "/v1/embeddings", "body": {"input": "hi"}},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = f"--input {source} --output {target}"
    done = _pagoda(f"generate --model {dummy_model} {DUMMY} {files}", code=1)
    assert "4 of 6 requests answered" in done.stderr
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert [result["custom_id"] for result in results] == [line["custom_id"] for line in lines]
    other = results.pop(3)
    assert other["response"] is None
    assert other["error"]["message"].endswith("/v1/rerank, got /v1/files.")
    statuses = [result["response"]["status_code"] for result in results]
    assert statuses == [200, 400, 200, 200, 200]
    assert results[3]["response"]["body"]["usage"]["output_tokens"] == 16
    assert len(results[4]["response"]["body"]["data"]) == 1
    assert results[0]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert results[1]["response"]["body"]["error"]["param"] == "n"


def test_chat_answers_piped_lines_and_commands(dummy_model: Path) -> None:
    done = _pagoda(
        f"chat {dummy_model} {DUMMY} --seed 1 --max-tokens 5",
        stdin="hello\n/reset\nhello\n/nonsense\n/exit\nnever\n",
    )
    assert "/nonsense is no command" in done.stderr
    half = len(done.stdout) // 2
    assert done.stdout[:half] == done.stdout[half:]


def test_chat_talks_to_a_running_server(sim_server: ServerProcess) -> None:
    done = _pagoda(f"chat --base-url {sim_server.base_url} --max-tokens 40", stdin="hello\n")
    assert done.stdout.strip()


def test_a_refused_question_is_one_sentence(sim_server: ServerProcess) -> None:
    done = _pagoda(
        f"chat --base-url {sim_server.base_url} --temperature -3", stdin="hello\n", code=2
    )
    assert "temperature" in done.stderr
