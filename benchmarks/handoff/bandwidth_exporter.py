# SPDX-License-Identifier: Apache-2.0
"""The process that holds the memory: `python -m benchmarks.handoff.bandwidth_exporter BYTES TRANSPORT...`.

Prints its port and its descriptors, as JSON, and serves until its standard input ends.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import sys
import threading

from pagoda.errors import TransportError
from pagoda.kv.memory import MemoryFile, OwnMemory, Region
from pagoda.plugins.disaggregation.transport.base import Access, ExportedMemory
from pagoda.plugins.disaggregation.transport.choose import TRANSPORTS

HOST = "127.0.0.1"
SECRET = b"bytes that both processes know"


def main() -> None:
    num_bytes = int(sys.argv[1])
    descriptor = os.memfd_create("bandwidth", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    memory = mmap.mmap(descriptor, num_bytes)
    pattern = os.urandom(2**20)
    for start in range(0, num_bytes, len(pattern)):
        memory[start : start + len(pattern)] = pattern[: num_bytes - start]
    region = Region(ctypes.addressof(ctypes.c_char.from_buffer(memory)), num_bytes)
    own = OwnMemory((region,), MemoryFile(descriptor, num_bytes, (0,)))
    exported: dict[str, ExportedMemory] = {}
    problems: dict[str, str] = {}
    for name in sys.argv[2:]:
        kind, _, encrypted = name.partition(", ")
        try:
            access = Access(HOST, SECRET, encrypts=bool(encrypted))
            exported[name] = TRANSPORTS[kind](own, access).export()
        except TransportError as error:
            problems[name] = str(error)
    listener = socket.create_server((HOST, 0))
    threading.Thread(target=_send_all, args=(listener, memoryview(memory)), daemon=True).start()
    told = {
        "port": listener.getsockname()[1],
        "file": f"/proc/{os.getpid()}/fd/{descriptor}",
        "descriptors": {name: memory.descriptor.hex() for name, memory in exported.items()},
        "problems": problems,
    }
    sys.stdout.write(f"HOLDS {json.dumps(told)}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


def _send_all(listener: socket.socket, memory: memoryview) -> None:
    """Sends all of the memory for each byte that comes."""
    stream, _ = listener.accept()
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while stream.recv(1):
        stream.sendall(memory)


if __name__ == "__main__":
    main()
