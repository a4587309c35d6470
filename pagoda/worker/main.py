"""The worker process: `python -m pagoda.worker.main ipc://PATH`.

Its configuration comes over standard input; then it answers step plans, in order, over one ZeroMQ pair socket.
Plans wait in the socket, so the next one is there when a step ends. Nothing here polls.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING

import msgspec
import zmq

from pagoda.engine.messages import (
    StepPlan,
    WorkerConfig,
    WorkerFailed,
    WorkerMessage,
    WorkerReady,
)
from pagoda.errors import ConfigError
from pagoda.ipc.codec import Codec
from pagoda.ipc.lifeline import hold_lifeline
from pagoda.ipc.machine import available_cores
from pagoda.telemetry.logging import configure_logging
from pagoda.worker.pinning import bind_this_thread, bind_threads, places
from pagoda.worker.threads import set_thread_waiting

if TYPE_CHECKING:
    from pagoda.worker.runner import Runner

_FAREWELL_MS = 5000
"""How long a last message may wait for the engine to fetch it."""

_log = logging.getLogger("pagoda.worker")


def main() -> None:
    hold_lifeline()
    configure_logging()
    set_thread_waiting(os.environ)
    (address,) = sys.argv[1:]
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WorkerConfig)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, _FAREWELL_MS)
    socket.setsockopt_string(zmq.IDENTITY, str(config.parallel.rank_in_replica(config.place)))
    socket.connect(address)
    codec = Codec[WorkerMessage](WorkerMessage)
    loaded = _load(config)
    if isinstance(loaded, WorkerFailed):
        socket.send(codec.encode(loaded))
        context.destroy()
        sys.exit(1)
    runner, ready = loaded
    socket.send(codec.encode(ready))
    decode = Codec[StepPlan](StepPlan).decode
    while True:
        socket.send(codec.encode(runner.step(decode(socket.recv()))))


def _load(config: WorkerConfig) -> tuple[Runner, WorkerReady] | WorkerFailed:
    try:
        # torch works without numpy, which nothing here needs; its complaint would only alarm.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        # Importing torch takes a second; until then the engine's hang-up must already be heard.
        if config.pin_threads:
            config = _pin_threads(config)
        from pagoda.worker.loading import load_runner

        return load_runner(config)
    except ConfigError as error:
        return WorkerFailed(str(error), is_user_error=True)
    except Exception as error:
        _log.exception("the model cannot be loaded")
        return WorkerFailed(f"{type(error).__name__}: {error}", is_user_error=False)


def _pin_threads(config: WorkerConfig) -> WorkerConfig:
    cores = places(os.sched_getaffinity(0))
    # Counted now: a thread that is bound sees one core.
    num_threads = config.num_threads or available_cores()
    bind_threads(cores, os.environ)
    import torch  # noqa: F401 - loaded while all cores are allowed still

    bind_this_thread(cores[0])
    return msgspec.structs.replace(config, num_threads=num_threads)


if __name__ == "__main__":
    main()
