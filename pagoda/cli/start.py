# SPDX-License-Identifier: Apache-2.0
"""The command `pagoda` from its first moment: what ends it before its modules are there is told plainly, too."""

from __future__ import annotations

import resource
import sys

_LEAST_FILES = 32
"""Files that a server with one engine opens at least."""


def main() -> int:
    """Runs one command; see `pagoda.cli.main`."""
    try:
        most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= most_files < _LEAST_FILES:
            print(
                f"pagoda: This process may open {most_files} files and needs {_LEAST_FILES}; "
                "let it open more (ulimit -n 1024).",
                file=sys.stderr,
            )
            return 2
        # Here, since an interrupt while this is imported is to be as quiet as one behind.
        from pagoda.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130
