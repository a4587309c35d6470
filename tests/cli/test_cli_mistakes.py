# SPDX-License-Identifier: Apache-2.0
"""Mistakes in what is asked of `pagoda`: one sentence on standard error, and exit code 2."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from pagoda.checkpoints.resolve import resolve_model
from pagoda.cli.main import EXIT_USAGE, main
from pagoda.cli.serve import ServerOptions
from pagoda.errors import ConfigError

ONE, TWO = "--base-url=http://127.0.0.1:1", "--base-url=http://127.0.0.1:2"

PREFIX_CACHE = "needs the prefix cache; leave --enable-prefix-caching on.$"
SIM, RAY = "has no effect with --executor sim", "has no effect with --executor ray"
NOT_ADDRESSES = [
    *(
        "",
        "5557",
        "127.0.0.1:5557",
        "tcp://127.0.0.1",
        "tcp://:5557",
        "tcp://host:",
        "tcp://host:-1",
    ),
    *("ipc:///tmp/events", "tcp://host:5557/", "tcp://a/b:5557", "tcp://::1:5557", "tcp://[]:5557"),
    "tcp://host:٣",
]

MISTAKES = [
    ("sevre", "sevre"),
    ("bench serve --prot 3", "--prot"),
    ("bench serve --num-prompts x", "--num-prompts"),
    ("bench serve --num-prompts 0", "--num-prompts"),
    ("bench serve --dataset foo", "--dataset"),
    ("bench serve --dataset jsonl", "--dataset jsonl needs --dataset-path"),
    ("bench serve --goodput fast", "--goodput takes limits"),
    ("bench serve --config no-such-file", "cannot read no-such-file"),
    ("bench serve --base-url ftp://x", "--base-url must begin with http"),
    ("demo nowhere", "there is no model directory 'nowhere'"),
    ("bench serve --top-p 0.9", "--top-p needs --temperature above 0"),
    ("bench serve --temperature nan", r"--temperature must be in \[0.0, 100.0\], got nan"),
    ("bench offline --repetition-penalty 0", "--repetition-penalty must be in"),
    ("bench serve --logprobs -1", "--logprobs"),
    (f"bench compare {ONE} {TWO} --temperature 1 --top-k -7", "--top-k must be in"),
    (f"bench compare {ONE}", "--base-url must be given at least twice"),
    (f"bench compare {ONE} {ONE}", "--base-url names the same server twice"),
    (f"bench compare {ONE} {TWO} --model m", r"--model must be given once .* \(2 times\)"),
    (f"bench compare {ONE} {TWO}", "Cannot reach a server at http://127.0.0.1:1"),
    (f"bench compare {ONE} {TWO} --concurrency 1,0", "--concurrency must be positive numbers"),
    ("serve no-such-model", "no-such-model"),
    ("serve --dtype int3", "--dtype"),
    ("serve --dtype int8", r"for --dtype\. .* Weights are rounded by --quantization int8\.$"),
    ("chat --quantization bfloat16", r"Number formats are chosen by --dtype bfloat16\.$"),
    ("serve --quantization awq", r"Checkpoints that are quantized already, .* need no flag\.$"),
    ("serve --load-format gguf", r"auto reads safetensors and GGUF files alike\.$"),
    ("serve --response-store-bytes 10000TB", "--response-store-bytes .* of memory that are free"),
    ("serve --files-dir x --files-max-bytes 8000000TB", "--files-max-bytes .* of the file system"),
    ("serve --default-chat-template-kwargs [1]", "--default-chat-template-kwargs takes a JSON"),
    ("serve --kv-cache-memory-bytes lots", "such as 2GiB"),
    ("serve --quantization-calibration t", "-calibration needs --quantization int8 or int4.$"),
    (
        "serve --quantization int4 --quantization-calibration no-such-text",
        "--quantization-calibration: cannot read no-such-text: No such file or directory.$",
    ),
    (
        "serve --quantization int4 --quantization-calibration t --tensor-parallel-size 2",
        "-calibration does not go with several devices or replicas, .* serve OUT.$",
    ),
    *(
        (f"serve --kv-events={it}", "--kv-events must be tcp://HOST:PORT, such as .*, got '")
        for it in NOT_ADDRESSES
    ),
    *(
        (f"serve --no-enable-prefix-caching {flag} {value}", f"{flag} {PREFIX_CACHE}")
        for flag, value in (
            ("--kv-events", "tcp://h:5"),
            ("--kv-host-bytes", "1GiB"),
            ("--kv-disk-path", "kv --kv-disk-bytes 7"),
        )
    ),
    ("serve --kv-disk-path kv", "--kv-disk-path needs --kv-disk-bytes, such as 100GiB.$"),
    ("serve --kv-disk-bytes 1GiB", "--kv-disk-bytes needs --kv-disk-path.$"),
    ("serve --kv-disk-min-touches 1", "--kv-disk-min-touches needs --kv-disk-path.$"),
    ("serve --kv-disk-min-touches 1 --kv-host-bytes 1GiB", "-touches needs --kv-disk-path.$"),
    (
        "serve --kv-load-failure fail",
        "--kv-load-failure needs --kv-host-bytes, --kv-disk-path, or --role decode or both.$",
    ),
    (
        "serve --kv-host-bytes much",
        "--kv-host-bytes takes an amount of memory such as 2GiB, 512MB or 1073741824, got 'much'.$",
    ),
    (
        "serve --kv-disk-path kv --kv-disk-bytes 99999999999999999999TiB",
        "--kv-disk-bytes takes an amount .*, got '99999999999999999999TiB'.$",
    ),
    ("serve --kv-host-bytes 0", "--kv-host-bytes must be int >= 1, got 0.$"),
    ("serve --sim-base-ms 1", "--sim-base-ms needs --executor sim"),
    ("serve --ray-address h:6379", "--ray-address needs --executor ray"),
    ("serve --executor nope", "--executor must be one of local, ray, sim, got 'nope'."),
    ("serve --executor sim --dtype float16", f"--dtype {SIM}"),
    ("serve --executor sim --threads 2", f"--threads {SIM}"),
    ("serve --executor sim --kv-cache-memory-bytes 10", f"--kv-cache-memory-bytes {SIM}"),
    ("serve --executor sim --memory-utilization 0.4", f"--memory-utilization {SIM}"),
    ("serve --executor sim --kv-host-bytes 1GiB", f"--kv-host-bytes {SIM}"),
    ("serve --executor sim --kv-disk-path kv", f"--kv-disk-path {SIM}"),
    ("serve --executor sim --kv-disk-bytes 1GiB", f"--kv-disk-bytes {SIM}"),
    ("serve --executor sim --tensor-parallel-size 2", f"--tensor-parallel-size {SIM}"),
    ("serve --executor sim --devices cpu:0", f"--devices {SIM}"),
    (
        'serve --executor sim --speculative-config {"model":"m"}',
        f"--speculative-config: draft_model {SIM}, .* choose suffix or ngram.$",
    ),
    ("serve --executor ray --pin-threads", f"--pin-threads {RAY}"),
    ("serve --executor ray --devices cpu:0", f"--devices {RAY}"),
    (
        "serve --executor ray --kv-disk-path kv --kv-disk-bytes 1GiB",
        "--kv-disk-path must be an absolute path where workers are on several hosts, got 'kv'.$",
    ),
    ("serve nowhere --tp 2 --devices cpu:0,cpu:0", "--devices names cpu:0 more than once"),
    (
        "serve --tp 2 --devices cuda:1,cuda:0",
        "--devices names cuda:1, but the cpu backend does not compute there",
    ),
    ("serve --port 70000", "--port"),
    ("serve --load-format dummy gpt-7", "qwen3-0.6b"),
    ("serve --join=h:1", "--join needs --cluster-key-file"),
    ("serve --advertise=h:5601", "--advertise with a port needs --cluster-key-file"),
    ("serve KEY", "--cluster-key-file needs --join, --role, or --advertise with a port"),
    ("serve KEY --join=etcd://h:1", "--join must be etcd://HOST:PORT/PREFIX"),
    ("serve KEY --join=a:1,b:0", "--join must be HOST:PORT.*'b:0'"),
    ("serve KEY --role=decode --advertise=::x", "--advertise must be HOST, HOST:PORT or :PORT"),
    ("serve KEY --role=decode --advertise=[a]", "--advertise must be HOST, HOST:PORT or :PORT"),
    ("serve KEY --join=[::x]:1 --advertise=a", "--join must be .* or \\[fd00::1\\]:5600"),
    ("serve KEY --join=a:1 --advertise=a/b", "--advertise must be HOST, HOST:PORT or :PORT"),
    ("route", "pagoda route needs --cluster-key-file, a file with the secret that hosts"),
    (
        "route KEY --discovery=etcd://h:1/p --join-listen=h:1",
        "--discovery and --join-listen exclude each other",
    ),
    ("route KEY --discovery=etcd://h:2379", "--discovery must be etcd://HOST:PORT/"),
    ("route KEY --discovery=etcd://h:2379/", "--discovery must be etcd://HOST:PORT/"),
    ("route KEY --discovery=etcd://h/p", "--discovery must be HOST:PORT"),
    ("route KEY --discovery=etcd://a:1,b/p", "--discovery must be HOST:PORT.*'b'"),
    ("route KEY --discovery=HOSTS", "line 2, must be HOST:PORT"),
    ("route KEY --join-listen=h", "--join-listen must be HOST:PORT"),
    ("route KEY --join-listen=h:99999", "--join-listen must be HOST:PORT"),
    ("route KEY --join-listen=TAKEN", r"--join-listen \S+ cannot be listened on \(Address"),
    ("route KEY --join=h", "--join must be HOST:PORT"),
    ("route KEY --advertise=h:x --join=h:1", "--advertise must be HOST, HOST:PORT or :PORT"),
    ("trace merge", "Name a directory"),
    ("trace merge nowhere", "nowhere is no directory"),
    ("trace report nowhere", "nowhere cannot be read"),
]


@pytest.mark.parametrize(
    ("command", "sentence"), MISTAKES, ids=[command for command, _ in MISTAKES]
)
def test_a_mistake_is_one_sentence(
    command: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, hosts = tmp_path / "key", tmp_path / "hosts"
    key.write_text("x" * 32)
    hosts.write_text("10.0.0.1:5601\n10.0.0.2\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for word, meaning in (
            ("KEY", f"--port=0 --cluster-key-file={key}"),
            ("HOSTS", str(hosts)),
            ("TAKEN", f"127.0.0.1:{taken.getsockname()[1]}"),
        ):
            command = command.replace(word, meaning)
        assert main(command.split()) == EXIT_USAGE
    said = capsys.readouterr()
    assert said.out == ""
    errors = [line for line in said.err.splitlines() if line.startswith("pagoda: ")]
    assert len(errors) == 1
    assert re.search(sentence, errors[0])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("num_promts: 3\n", "num_promts is not a flag of 'pagoda bench serve'."),
        ("serve:\n  num_prompts: 3\n", "serve is not a flag of 'pagoda bench serve'."),
        ("config: other.yaml\n", "config is not a flag of 'pagoda bench serve'."),
        ("- num_prompts\n", "must hold one 'flag: value' a line."),
        ("num_prompts: [1\n", "is not valid YAML at line 2."),
        ("num_prompts: many\n", "many"),
    ],
)
def test_a_bad_config_file_is_one_sentence(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "flags.yaml"
    config.write_text(text)
    assert main(["bench", "serve", "--config", str(config)]) == EXIT_USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_a_bad_environment_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGODA_NUM_PROMPTS", "many")
    assert main(["bench", "serve"]) == EXIT_USAGE
    assert "PAGODA_NUM_PROMPTS" in capsys.readouterr().err


def test_a_machine_with_little_free_memory_takes_the_default_of_the_store_of_responses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pagoda.cli.serve.available_memory_bytes", lambda: 2**27)
    files = resolve_model(None)
    assert ServerOptions().config(files).api.response_store_bytes == 2**28
    with pytest.raises(ConfigError, match="--response-store-bytes 300 MiB is more than the 128"):
        ServerOptions(response_store_bytes="300MiB").config(files)
