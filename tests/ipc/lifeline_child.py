# SPDX-License-Identifier: Apache-2.0
"""Run as a child process by test_lifeline."""

from __future__ import annotations

import os
import signal
import sys
import time

from pagoda.ipc.lifeline import ChildProcess, hold_lifeline


def main() -> None:
    hold_lifeline()
    match sys.argv[1]:
        case "exit-with-input":
            os._exit(int(sys.stdin.read()))
        case "sleep":
            time.sleep(60)
        case "signals":
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        case "parent":
            child = ChildProcess("lifeline_child", ["middle"])
            print(child.pid, flush=True)
            time.sleep(60)
        case "middle":
            child = ChildProcess("lifeline_child", ["sleep"])
            print(child.pid, flush=True)
            time.sleep(60)


if __name__ == "__main__":
    main()
