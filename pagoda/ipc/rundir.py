"""The private directory in which the sockets of one server lie."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

_NAME = re.compile(r"pagoda-(\d+)-.*")


class RuntimeDirectory:
    """A directory that only this user may enter, removed by `close`.

    A process that is killed cannot remove its directory, so the next one does: those of processes that no
    longer exist are swept at the start.
    """

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=f"pagoda-{os.getpid()}-"))  # made with mode 0700

    def address(self, name: str) -> str:
        """A ZeroMQ address in this directory."""
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _sweep(parent: Path) -> None:
    for directory in parent.glob("pagoda-*"):
        match = _NAME.fullmatch(directory.name)
        if match and directory.stat().st_uid == os.getuid() and not _exists(int(match[1])):
            shutil.rmtree(directory, ignore_errors=True)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
