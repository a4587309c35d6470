# SPDX-License-Identifier: Apache-2.0
"""Readers of files: models, adapters, lists of hosts, flags, KV on disk, fragments of traces."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from cyclopts import CycloptsError

from benchmarks.chaos.fuzz.forms import JSON, SAFETENSORS
from benchmarks.chaos.fuzz.gguf_form import GGUF
from benchmarks.chaos.fuzz.target import Feed, Target
from pagoda.checkpoints.adapters import read_adapter
from pagoda.checkpoints.config_json import parse_model_config, read_model_config
from pagoda.checkpoints.contents import missing_tensor, tensor_names, unread_tensors
from pagoda.checkpoints.fingerprint import model_digest, weights_digest
from pagoda.checkpoints.gguf.config import gguf_model_config
from pagoda.checkpoints.gguf.reader import read_gguf
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.presets import PRESETS
from pagoda.checkpoints.resolve import resolve_model
from pagoda.checkpoints.topology import check_shares
from pagoda.cli.main import build_app
from pagoda.errors import ConfigError, InvalidRequestError
from pagoda.ipc.clock import MonotonicClock
from pagoda.messages.transfers import TierPlace
from pagoda.parallel.config import ParallelConfig
from pagoda.plugins.disk_tier.objects import (
    Manifest,
    ObjectError,
    ObjectFiles,
    open_directory,
    seal,
)
from pagoda.plugins.disk_tier.scanner import DiskScanner, ScanEnded
from pagoda.plugins.router.discovery.hosts_file import read_hosts
from pagoda.plugins.trace.merge.chrome import read_chrome_trace, write_chrome_trace
from pagoda.plugins.trace.merge.merging import merge_fragments
from pagoda.plugins.trace.report.reporting import report_of
from pagoda.text.model_text import ModelText, load_gguf_text, load_model_text
from pagoda.text.templates.chat_template import ChatTemplate

_WORDS = "A tower, and 5 pagodas: naïve 東京 <|im_end|> \n\t"
_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    },
    {"role": "tool", "content": "5", "tool_call_id": "1"},
]
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

Read = Callable[[Path, bytes], object]
"""Writes an input into a directory and reads it as a server does."""


def _reader(read: Read) -> Callable[[Path], AbstractContextManager[Feed]]:
    """A target's `open` for a reader that raises ConfigError for whatever is wrong."""

    @contextmanager
    def opened(room: Path) -> Iterator[Feed]:
        def feed(data: bytes) -> None:
            with contextlib.suppress(ConfigError, InvalidRequestError):
                read(room, data)

        yield feed

    return opened


def _look_at(spec: ModelSpec, names: set[str]) -> None:
    """Does what a server does with the shape of a model before it reads weights."""
    missing_tensor(spec, names)
    list(unread_tensors(spec, list(names)[:8])) if len(spec.layers) < 100 else None
    with contextlib.suppress(ConfigError):
        check_shares("model", spec, ParallelConfig(tensor_parallel_size=2))


def _use(text: ModelText) -> None:
    """Does what a server does with the text side of a model."""
    ids = text.tokenizer.encode(_WORDS, add_special_tokens=True)
    text.tokenizer.decode(ids)
    decoder = text.tokenizer.incremental((), skip_special_tokens=True)
    "".join(map(decoder.push, ids)) + decoder.flush()
    for token_id in ids[:4]:
        text.tokenizer.token_bytes(token_id)
    if text.chat_template is not None:
        text.chat_template.render(
            _MESSAGES, tools=_TOOLS if text.chat_template.takes_tools else None
        )
    text.formats  # noqa: B018


def _gguf(room: Path, data: bytes) -> None:
    path = room / "model.gguf"
    path.write_bytes(data)
    file = read_gguf(path)
    with contextlib.suppress(ConfigError):
        _look_at(gguf_model_config(file), set())
    with contextlib.suppress(ConfigError):
        model_digest(resolve_model(str(path)))
    _use(load_gguf_text(path))


def _config(room: Path, data: bytes) -> None:
    (room / "config.json").write_bytes(data)
    _look_at(read_model_config(room), {"model.embed_tokens.weight"})


def _safetensors(room: Path, data: bytes) -> None:
    (room / "model.safetensors").write_bytes(data)
    (room / "config.json").write_text(json.dumps(PRESETS["qwen3-0.6b"]), encoding="utf-8")
    with contextlib.suppress(ConfigError):
        tensor_names(room)
    with contextlib.suppress(ConfigError):
        read_model_config(room)
    weights_digest(str(room), "auto", 0)


def _index(room: Path, data: bytes) -> None:
    (room / "model.safetensors.index.json").write_bytes(data)
    (room / "a.safetensors").write_bytes(_header({}))
    with contextlib.suppress(ConfigError):
        tensor_names(room)
    (room / "config.json").write_text(json.dumps(PRESETS["qwen3-0.6b"]), encoding="utf-8")
    weights_digest(str(room), "auto", 0)


def _header(entries: Mapping[str, Any]) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def _adapter(room: Path, data: bytes) -> None:
    """The input is an object of the two files' contents."""
    try:
        parts = json.loads(data)
        config, header = parts["config"], parts["header"]
        size = min(int(parts["size"]), 2**20)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        config, header, size = None, None, 0
        (room / "adapter_config.json").write_bytes(data)
    if header is not None:
        (room / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    (room / "adapter_model.safetensors").write_bytes(_header(header) + bytes(max(0, size)))
    values = {**PRESETS["qwen3-0.6b"], "num_hidden_layers": 2}
    read_adapter(room, parse_model_config(values, source="model"), max_rank=64)


def _tokenizer(room: Path, data: bytes) -> None:
    (room / "tokenizer.json").write_bytes(data)
    _use(load_model_text(room))


_TEXT_FILES = (
    *("tokenizer_config.json", "generation_config.json", "special_tokens_map.json"),
    *("config.json", "chat_template.json", "modules.json", "1_Pooling/config.json"),
    *("sentence_bert_config.json", "config_sentence_transformers.json"),
)


def _text_files(room: Path, data: bytes) -> None:
    """The input is an object of files' contents; one that is none stands in every file."""
    try:
        contents = json.loads(data)
    except (ValueError, RecursionError):
        contents = None
    tiny = resolve_model(None).directory
    if tiny is None:
        raise ValueError("the embedded model has no directory")
    if not (room / "tokenizer.json").exists():
        shutil.copy(tiny / "tokenizer.json", room)
        (room / "1_Pooling").mkdir()
    for name in _TEXT_FILES:
        path = room / name
        path.unlink(missing_ok=True)
        if isinstance(contents, dict) and name in contents:
            path.write_text(json.dumps(contents[name]), encoding="utf-8")
        elif not isinstance(contents, dict):
            path.write_bytes(data)
    _use(load_model_text(room))


def _template(room: Path, data: bytes) -> None:
    del room
    template = ChatTemplate(data.decode(errors="replace"), special_tokens={"bos_token": "<s>"})
    for tools in (None, _TOOLS):
        with contextlib.suppress(InvalidRequestError):
            template.render(_MESSAGES, tools=tools)


def _hosts(room: Path, data: bytes) -> None:
    path = room / "hosts"
    path.write_bytes(data)
    read_hosts(path)


def _flags(room: Path, data: bytes) -> None:
    path = room / "flags.yaml"
    path.write_bytes(data)
    with contextlib.suppress(CycloptsError):
        build_app().parse_args(
            ["serve", "--config", str(path)], exit_on_error=False, print_error=False
        )


def _trace(room: Path, data: bytes) -> None:
    """The input is the fragments of two processes, with a zero byte between them."""
    one, _, other = data.partition(b"\0")
    (room / "a.fragment.jsonl").write_bytes(one)
    (room / "b.fragment.jsonl").write_bytes(other)
    merged = merge_fragments([room])
    report_of(merged)
    write_chrome_trace(merged, room / "trace.json")
    read_chrome_trace(room / "trace.json")


def _merged_trace(room: Path, data: bytes) -> None:
    path = room / "trace.json"
    path.write_bytes(data)
    trace = read_chrome_trace(path)
    report_of(trace)


_MANIFEST = Manifest(
    model="m",
    model_digest="1",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    quantization="",
    arithmetic="1",
    layout="1",
    block_size=16,
    payload_bytes=512,
)
_KEY = bytes(range(32))


@contextmanager
def _open_objects(room: Path) -> Iterator[Feed]:
    """An object, a manifest, and names in a directory of KV blocks; the first byte says which."""
    directory = open_directory(room, _MANIFEST)
    files = ObjectFiles(directory, _MANIFEST)
    buffer = files.new_buffer()
    (directory / "00").mkdir()
    path = directory / "00" / _KEY.hex()[2:]
    good = bytearray(_MANIFEST.object_bytes)
    seal(memoryview(good), _KEY, _MANIFEST.payload_bytes)

    def feed(data: bytes) -> None:
        kind, rest = data[:1], data[1:]
        if kind == b"o":
            path.write_bytes(rest[: _MANIFEST.object_bytes].ljust(_MANIFEST.object_bytes, b"\0"))
        elif kind == b"s":
            path.write_bytes(rest)
        elif kind == b"m":
            (directory / "manifest.json").write_bytes(rest)
            with contextlib.suppress(ConfigError):
                open_directory(room, _MANIFEST)
        else:
            path.write_bytes(good)
        with contextlib.suppress(ObjectError):
            files.read(_KEY, buffer)
            if kind in b"os" and bytes(buffer) != path.read_bytes():
                raise AssertionError("an object was read otherwise than it was written")

    yield feed


@contextmanager
def _open_directory(room: Path) -> Iterator[Feed]:
    """A tree of files, links and pipes as a root of KV blocks; each line of the input makes an entry."""

    def feed(data: bytes) -> None:
        root = room / "root"
        shutil.rmtree(root, ignore_errors=True)
        own = open_directory(root, _MANIFEST)
        for line in data.splitlines()[:32]:
            _make_entry(own if line[:1] == b"+" else root, line[1:])
        scanner = DiskScanner(
            [TierPlace("disk", str(own), _MANIFEST.object_bytes)], MonotonicClock()
        )
        try:
            scanner.remove(0, [_KEY])
            while not any(isinstance(news, ScanEnded) for news in scanner.poll()):
                select.select([scanner.fileno()], [], [], 1.0)
                if not scanner.thread.is_alive():
                    raise AssertionError("the scanner's thread ended")
        finally:
            scanner.close()

    yield feed


def _make_entry(where: Path, line: bytes) -> None:
    kind, name = line[:1], line[1:].decode(errors="replace").replace("..", "").strip("/\0")
    path = where / name
    with contextlib.suppress(OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
        match kind:
            case b"l":
                path.symlink_to(where)
            case b"p":
                os.mkfifo(path)
            case b"d":
                path.mkdir()
            case b"x":
                path.symlink_to("/dev/zero")
            case _:
                with open(path, "wb", opener=_open_at_once) as file:
                    file.write(line)


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file. Raises OSError: it is a pipe that nobody reads, for whose reader others would wait."""
    return os.open(path, flags | os.O_NONBLOCK, 0o600)


_JINJA_WORDS = (
    *("{%", "%}", "{{", "}}", "{%-", "-%}", "for", "in", "endfor", "if", "else", "endif", "set"),
    *("macro", "endmacro", "namespace", "messages", "tools", "range", "loop", "raise_exception"),
    *("|tojson", "|join", "|map", "|replace", "|trim", "|length", "|list", "|format", "is defined"),
    *(".content", ".role", "['role']", "strftime_now", "recursive", "loop(", "call", "endcall"),
    *("add_generation_prompt", "bos_token", "**", "*", "~", "+", "%", ".split(", ".strip()"),
)

FILES = (
    Target("gguf", _reader(_gguf), GGUF),
    Target("config_json", _reader(_config), JSON),
    Target("safetensors", _reader(_safetensors), SAFETENSORS),
    Target("safetensors_index", _reader(_index), JSON),
    Target("adapter", _reader(_adapter), JSON),
    Target("tokenizer_json", _reader(_tokenizer), JSON),
    Target("text_files", _reader(_text_files), JSON),
    Target("chat_template", _reader(_template), words=_JINJA_WORDS),
    Target("hosts_file", _reader(_hosts), words=("#", "\n", ":", "[::1]", "10.0.0.1:5600")),
    Target(
        "flags_yaml",
        _reader(_flags),
        words=("model: ", "max-model-len: ", "- ", "&a ", "*a", "<<: "),
    ),
    Target("trace_fragments", _reader(_trace)),
    Target("merged_trace", _reader(_merged_trace)),
    Target("kv_objects", _open_objects),
    Target("kv_directory", _open_directory),
)
