# SPDX-License-Identifier: Apache-2.0
"""Jobs: one piece of work on models, in a process of its own that may load torch (`pagoda.messages.jobs`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar, cast

import msgspec

from pagoda.errors import ConfigError, EngineDeadError
from pagoda.ipc.lifeline import ChildProcess
from pagoda.messages.jobs import JobFailed, JobProgress

R = TypeVar("R", bound=msgspec.Struct)


def run_job(
    module: str,
    config: msgspec.Struct,
    result: type[R],
    on_progress: Callable[[int, int], None],
) -> R:
    """The result of `python -m module`; `on_progress` is called with what is done and the total.

    Whatever ends the wait, such as Ctrl-C, ends the process too.

    Raises ConfigError: the job says what is wrong with its configuration. EngineDeadError: the job failed or died.
    """
    decode = msgspec.json.Decoder(JobProgress | JobFailed | result).decode
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as messages:
        try:
            child = ChildProcess(
                module, [], config=msgspec.msgpack.encode(config), stdout=write_end
            )
        finally:
            os.close(write_end)
        try:
            for line in messages:
                message = decode(line)
                if isinstance(message, JobProgress):
                    on_progress(message.done, message.total)
                elif isinstance(message, JobFailed):
                    raise (ConfigError if message.is_user_error else EngineDeadError)(message.error)
                else:
                    return cast("R", message)
            raise EngineDeadError(f"{module} {child.describe_end()} before it had a result.")
        finally:
            child.close()
