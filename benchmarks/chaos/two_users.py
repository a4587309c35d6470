# SPDX-License-Identifier: Apache-2.0
"""Another user of the machine tries all that a server leaves open: sockets, ports, files, shared memory, /proc.

The server serves `pagoda-tiny` with tiers in host memory and on disk, handoff, uploaded files and a trace, in
directories that the other user may look at. Root collects what there is to try; a forked process becomes the user
`nobody`, tries it, and tells what it could do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import stat
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import zmq
from zmq.utils.monitor import recv_monitor_message

from benchmarks.chaos.trial import Outcome, Trial
from pagoda.api.auth.keys import EVERY_ROUTE, ApiKey, digest_of
from pagoda.api.auth.keys_file import changed_keys
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.server_process import ServerProcess, server_process

_NOBODY = 65534
_SHARED_MEMORY = "/dev/shm/"
_PRIVATE_OF_PROCESSES = ("environ", "mem", "maps", "auxv", "syscall", "stack", "fd", "map_files")
_ANSWER_S = 0.5
"""Seconds that a port is listened to for a handshake or an answer."""


@dataclass(frozen=True)
class _Targets:
    """Everything that the other user tries."""

    paths: Sequence[Path]
    unix_sockets: Sequence[str]
    """Paths, or names with a zero byte before them."""
    ports: Sequence[int]
    pids: Sequence[int]
    http_url: str


def _run(short: bool) -> Outcome:
    if os.geteuid() != 0:
        return Outcome("not tried: only root can become another user", False)
    with tempfile.TemporaryDirectory(prefix="two-users-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        key, cluster_key = secrets.token_hex(), secrets.token_hex()
        with server_process(_flags(directory, key, cluster_key)) as server:
            asyncio.run(_use(server.base_url, key, 2 if short else 20))
            targets = _targets(server, directory)
            told = [
                *_as_nobody(targets),
                *_secrets_in_command_lines(targets.pids, (key, cluster_key)),
            ]
    tried = (
        f"{len(targets.paths)} files and directories, {len(targets.unix_sockets)} sockets, "
        f"{len(targets.ports)} ports besides HTTP, /proc of {len(targets.pids)} processes"
    )
    if told:
        return Outcome(f"of {tried}: {'; '.join(sorted(told))}", False)
    return Outcome(f"{tried}: nothing readable, writable or answering", True)


def _flags(directory: Path, key: str, cluster_key: str) -> list[str]:
    keys, cluster = directory / "keys", directory / "cluster"
    with changed_keys(keys) as listed:
        listed.append(ApiKey(name="own", sha256=digest_of(key), scopes=EVERY_ROUTE))
    cluster.touch(0o600)
    cluster.write_text(cluster_key)
    return [
        *("--api-keys-file", str(keys), "--files-dir", str(directory / "files")),
        *("--kv-host-bytes", "32MiB", "--num-kv-blocks", "160", "--kv-disk-min-touches", "1"),
        *("--kv-disk-path", str(directory / "kv"), "--kv-disk-bytes", "32MiB"),
        *("--role", "both", "--cluster-key-file", str(cluster), "--advertise", _free_address()),
        *("--profile", "e2e", "--profile-dir", str(directory / "trace"), "--log-level", "warning"),
    ]


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


async def _use(base_url: str, key: str, num_prompts: int) -> None:
    """Fills the cache, so that blocks go to the tiers."""
    async with OpenAIClient(base_url, key) as client:
        model = await client.first_model()
        for number in range(num_prompts):
            body = {"model": model, "prompt": f"{number} " + "word " * 200, "max_tokens": 4}
            await client.post("/v1/completions", body)
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"{}", filename="f")
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(base_url, headers=headers) as session,
        session.post("/v1/files", data=form) as answer,
    ):
        answer.raise_for_status()


def _targets(server: ServerProcess, directory: Path) -> _Targets:
    first = psutil.Process(server.pid)
    processes = [first, *first.children(recursive=True)]
    inodes = {inode for process in processes for inode in _socket_inodes(process.pid)}
    http_port = int(server.base_url.rpartition(":")[2])
    listening = {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    unix_sockets = sorted(set(_unix_sockets(inodes)))
    paths = set(directory.rglob("*"))
    for place in {Path(name).parent for name in unix_sockets if not name.startswith("\0")}:
        paths.update((place, *place.rglob("*")))
    for process in processes:
        paths.update(_open_paths(process.pid))
        paths.update(_mapped_files(process.pid))
    return _Targets(
        sorted(path for path in paths if path.exists()),
        unix_sockets,
        sorted(listening - {http_port}),
        [process.pid for process in processes],
        server.base_url,
    )


def _socket_inodes(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(link)
            if target.startswith("socket:["):
                yield target.removeprefix("socket:[").removesuffix("]")


def _open_paths(pid: int) -> Iterator[Path]:
    """Files that a process has open to write, and memory that it shares, through the links of /proc."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            mode = os.stat(link).st_mode
            if stat.S_ISREG(mode) and os.lstat(link).st_mode & stat.S_IWUSR:
                yield link


def _mapped_files(pid: int) -> Iterator[Path]:
    """Shared memory with a name."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        name = line.split(maxsplit=5)[-1]
        if name.startswith(_SHARED_MEMORY):
            yield Path(name)


def _unix_sockets(inodes: set[str]) -> Iterator[str]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        *_, inode, name = (*line.split(maxsplit=7), "")[:8]
        if inode in inodes and name:
            yield name.replace("@", "\0", 1) if name.startswith("@") else name


def _secrets_in_command_lines(pids: Sequence[int], known: Sequence[str]) -> Iterator[str]:
    for pid in pids:
        line = Path(f"/proc/{pid}/cmdline").read_text()
        if any(secret in line for secret in known):
            yield f"a key stands on the command line of process {pid}"


# ---- the other user


def _as_nobody(targets: _Targets) -> list[str]:
    """Lists what the user `nobody` could do."""
    "".encode("idna")  # modules that are loaded at the first use: `nobody` may not read them
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
            told = list(_try_all(targets))
        except BaseException as error:
            told = [f"the other user failed: {error!r}"]
        os.write(write_end, json.dumps(told).encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        told = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return list(told)


def _try_all(targets: _Targets) -> Iterator[str]:
    if os.access("/proc/1/mem", os.R_OK):
        yield "this user may read all memory, so the trial says nothing"
    for path in targets.paths:
        yield from _try_path(path)
    for name in targets.unix_sockets:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as attempt:
            attempt.connect(name)
            attempt.settimeout(_ANSWER_S)
            attempt.sendall(b"hello" * 64)
            if attempt.recv(4096):
                yield f"{name!r} answers strangers"
    for port in targets.ports:
        yield from _try_port(port)
    for pid in targets.pids:
        yield from _try_process(pid)
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(f"{targets.http_url}/metrics", timeout=30)
        yield "/metrics answers without a key"


def _try_path(path: Path) -> Iterator[str]:
    for flags, word in ((os.O_RDONLY, "readable"), (os.O_WRONLY, "writable")):
        with contextlib.suppress(OSError):
            os.close(os.open(path, flags | os.O_NONBLOCK))
            yield f"{path} is {word}"
    with contextlib.suppress(OSError):
        made = path / "intruder"
        os.close(os.open(made, os.O_CREAT | os.O_WRONLY))
        yield f"{path} takes new files"
    with contextlib.suppress(OSError):
        path.rename(path.with_name("renamed"))
        yield f"{path} can be renamed"


def _try_port(port: int) -> Iterator[str]:
    """Asks a port as a peer without keys, and with bytes that are no handshake at all."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        events = peer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        peer.connect(f"tcp://127.0.0.1:{port}")
        peer.send(b"hello", zmq.NOBLOCK)
        if events.poll(int(_ANSWER_S * 1e3)):
            recv_monitor_message(events)
            yield f"port {port} takes a peer without keys"
        peer.disable_monitor()
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as line:
        line.settimeout(_ANSWER_S)
        line.sendall(b"GET / HTTP/1.0\r\n\r\n" * 8)
        answer = line.recv(4096)
        if answer and not answer.startswith(b"\xff"):  # the greeting of ZMTP
            yield f"port {port} answers strangers: {answer[:40]!r}"


def _try_process(pid: int) -> Iterator[str]:
    for name in _PRIVATE_OF_PROCESSES:
        path = Path(f"/proc/{pid}/{name}")
        with contextlib.suppress(OSError):
            if path.is_dir():
                if os.listdir(path):
                    yield f"{path} can be listed"
            elif _reads(path):
                yield f"{path} is readable"
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        yield f"process {pid} takes signals"


def _reads(path: Path) -> bool:
    with path.open("rb") as file:
        file.read(1)
    return True


TWO_USERS = Trial(
    "two-users",
    "another user of the machine tries every socket, port, file, shared memory and /proc entry of a server with "
    "tiers, handoff, uploads and a trace",
    "nothing readable or writable, no key on a command line",
    _run,
)
