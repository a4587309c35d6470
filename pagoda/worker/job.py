# SPDX-License-Identifier: Apache-2.0
"""A job's process: configuration in, progress and a result out (`pagoda.messages.jobs`)."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn, TypeVar

import msgspec

from pagoda.errors import PagodaError
from pagoda.ipc.lifeline import hold_lifeline
from pagoda.messages.jobs import JobFailed, JobProgress
from pagoda.telemetry.logging import configure_logging
from pagoda.worker.pinning import set_library_options

C = TypeVar("C", bound=msgspec.Struct)
OnProgress = Callable[[int, int], None]
"""Takes what is done and the total."""

_log = logging.getLogger("pagoda.worker")


def run(kind: type[C], work: Callable[[C, OnProgress], msgspec.Struct]) -> NoReturn:
    """Runs `work` on the configuration from standard input and ends the process.

    `work` imports torch itself, so that the parent's end is heard from the beginning.
    """
    hold_lifeline()
    # What libraries print goes to standard error; only messages go where the parent reads.
    messages = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    configure_logging()
    set_library_options(os.environ)
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=kind)

    def send(message: msgspec.Struct) -> None:
        messages.write(msgspec.json.encode(message) + b"\n")
        messages.flush()

    try:
        send(work(config, lambda done, total: send(JobProgress(done, total))))
    except PagodaError as error:
        send(JobFailed(str(error), is_user_error=True))
    except Exception as error:
        _log.exception("the job failed")
        send(JobFailed(f"{type(error).__name__}: {error}", is_user_error=False))
    sys.stderr.flush()
    os._exit(0)
