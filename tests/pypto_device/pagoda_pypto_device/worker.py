# SPDX-License-Identifier: Apache-2.0
"""Workers of the device, with the methods of PyPTO's `DistributedWorker`.

Programs run in the order in which they were submitted: some at once, others only when something waits for them, as
late as a device may. The host's arguments are read when a program runs. Until then its results are poison.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from pagoda.plugins.pypto.contract import WEIGHTS
from pagoda_pypto_device.checks import (
    Arguments,
    check_arguments,
    decode_tokens,
    poison,
    prefill_tokens,
    selection,
)
from pagoda_pypto_device.compute import PoolView, Tokens, Weights, compute, read_weights, select
from pagoda_pypto_device.memory import ChipMemory, ContractError, DeviceTensor, SharedMemory
from pagoda_pypto_device.settings import Settings

if TYPE_CHECKING:
    from pagoda_pypto_device.library import CompiledProgram


class Log:
    """A line for each call, copy to the host and wrong argument, in files that all workers append to."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory) if directory else None

    def write(self, name: str, line: str) -> None:
        if self._directory is None:
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        file = os.open(self._directory / name, flags, 0o600)
        os.write(file, f"{line}\n".encode())
        os.close(file)

    def count(self, name: str) -> int:
        """Lines that were written under a name."""
        if self._directory is None or not (self._directory / name).exists():
            return 0
        return (self._directory / name).read_bytes().count(b"\n")


class _Run:
    """A program that was submitted."""

    def __init__(
        self, worker: DistributedWorker, program: CompiledProgram, args: Arguments
    ) -> None:
        self._worker, self.program, self.args = worker, program, args
        self.device_ns = 0
        self.ended = False
        self.error: Exception | None = None

    def result(self) -> None:
        self._worker.run_until(self)
        if self.error is not None:
            raise self.error


class DistributedWorker:
    def __init__(
        self, programs: Sequence[CompiledProgram], chips: Sequence[int], settings: Settings
    ) -> None:
        self._chips = [ChipMemory(number, settings.memory_bytes) for number in chips]
        self._shared = SharedMemory()
        self._programs = list(programs)
        self.settings, self._log = settings, Log(settings.log)
        self._random = Random(f"{settings.seed} {self._log.count('workers')}")
        self._log.write("workers", str(os.getpid()))
        self.pending: deque[_Run] = deque()
        self._lock = threading.RLock()
        self._arena = 0
        """Bytes of rings, which are taken at the first run."""
        self._lost = self._closed = False
        self._weights: tuple[object, Weights] | None = None

    # ---- memory

    def alloc_tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        init: torch.Tensor | None = None,
        worker_id: int = 0,
    ) -> DeviceTensor:
        with self._lock, self._recorded():
            chip = self._chip(worker_id)
            if chip.taken + self._arena > chip.total:
                raise RuntimeError("rings have taken the memory")
            made = chip.allocate(shape, dtype)
            if init is not None:
                if tuple(init.shape) != made.shape or init.dtype != dtype:
                    raise ContractError(
                        f"{list(made.shape)} of {dtype} is to begin as another tensor"
                    )
                if not init.is_contiguous() or not init.is_shared():
                    raise ContractError("an upload is not contiguous in shared memory")
                self.copy_to(made.data_ptr, init.data_ptr(), init.nbytes, worker_id=worker_id)
            return made

    def free_tensor(self, tensor: DeviceTensor, *, worker_id: int = 0) -> None:
        with self._lock, self._recorded():
            self._settle()
            self._chip(worker_id).free(tensor)

    def copy_to(self, dst: int, src: int, nbytes: int, *, worker_id: int = 0) -> None:
        with self._lock, self._recorded():
            self._settle()
            chip = self._chip(worker_id)
            target = chip.bytes_at(dst, nbytes, "a copy to a chip")
            target.copy_(self._shared.bytes_at(src, nbytes, "a copy's source"))
            chip.wrote(dst)

    def copy_from(self, dst: int, src: int, nbytes: int, *, worker_id: int = 0) -> None:
        with self._lock, self._recorded():
            self._settle()
            source = self._chip(worker_id).bytes_at(src, nbytes, "a copy from a chip")
            self._shared.bytes_at(dst, nbytes, "a copy's target").copy_(source)
            self._log.write("downloads", str(nbytes))

    def device_memory_info(self, worker_id: int = 0) -> tuple[int, int]:
        """Free and all bytes; the driver does not see rings."""
        chip = self._chip(worker_id)
        return chip.total - chip.taken, chip.total

    def committed_device_memory(self, worker_id: int = 0) -> int:
        return self._chip(worker_id).taken + self._arena

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._log.write("closed", str(os.getpid()))

    def _chip(self, worker_id: int) -> ChipMemory:
        if self._closed:
            raise ContractError("the worker is closed")
        if not 0 <= worker_id < len(self._chips):
            raise ContractError(f"there is no worker {worker_id}")
        if self._lost:
            raise RuntimeError("the worker was lost")
        return self._chips[worker_id]

    # ---- programs

    def submit(self, program: CompiledProgram, *args: Any) -> _Run:
        with self._lock, self._recorded():
            self._chip(0)
            if program not in self._programs:
                raise ContractError("a program is run that the worker was not opened for")
            self._arena = program.topology.ring_heap
            contract = program.contract
            checked = check_arguments(contract, program.name, args, self._chips, self._shared)
            outputs = [arg.meaning for arg in contract.programs[program.name].args]
            poison(checked, [each for each in outputs if each in _RESULTS[program.name]])
            run = _Run(self, program, checked)
            self.pending.append(run)
            if self._random.random() >= self.settings.late_rate:
                self.run_until(run)
            return run

    def run_until(self, run: _Run) -> None:
        """Runs all programs up to one."""
        with self._lock:
            while not run.ended:
                self._run_next()

    def _settle(self) -> None:
        while self.pending:
            self._run_next()

    def _run_next(self) -> None:
        run = self.pending.popleft()
        began = time.perf_counter_ns()
        try:
            with self._recorded(), torch.inference_mode():
                self._fail_at_random()
                self._execute(run.program, run.args)
        except Exception as error:
            self._lost = self._lost or not isinstance(error, ContractError)
            run.error = error
        run.device_ns = time.perf_counter_ns() - began
        run.ended = True
        self._log.write("calls", run.program.name)

    def _fail_at_random(self) -> None:
        if self._lost:
            raise RuntimeError("the worker was lost")
        drawn, failing = self._random.random(), self.settings.failure_rate
        at = self.settings.fail_at
        if drawn < failing or (at and self._log.count("calls") in at):
            self._log.write("failures", "failed")
            raise RuntimeError("AICore exception, error code 507015")
        if drawn < failing + self.settings.timeout_rate:
            self._log.write("failures", "timed out")
            raise TimeoutError("TENSOR_WAIT_TIMEOUT")

    def _execute(self, program: CompiledProgram, args: Arguments) -> None:
        contract = program.contract
        if program.name == "topk_select":
            rows, k = selection(contract, args)
            best, tokens = select(args.one("logits")[:rows], contract.sizes["REAL_V"], k)
            values, indices = args.one("topk_values"), args.one("topk_indices")
            values.fill_(torch.finfo(torch.float32).min)
            indices.zero_()
            values[:rows, :k], indices[:rows, :k] = best, tokens
            return
        if program.name == "prefill":
            tokens, active = prefill_tokens(contract, args), 0
        else:
            tokens, active = decode_tokens(contract, args)
        logits = args.one("logits")
        if bool((tokens.slots == -1).all()):
            logits.zero_()
            return
        computed = self._computed(program, args, tokens)
        logits[: len(computed)] = computed
        if active:
            logits[active:] = computed[:1]
            likeliest = logits[:, : contract.sizes["REAL_V"]].argmax(1).int()
            args.one("sampled")[:] = likeliest[:, None]
            args.one("next_hidden").copy_(args.one("embedding")[likeliest.long()])

    def _computed(self, program: CompiledProgram, args: Arguments, tokens: Tokens) -> torch.Tensor:
        contract, sizes = program.contract, args.sizes
        shape = (sizes["L"], sizes["PAGES"], sizes["PAGE"], -1, sizes["D"])
        pool = PoolView(
            *([part.view(shape) for part in args.held[kind]] for kind in ("keys", "values"))
        )
        return compute(contract, self._held_weights(program, args), pool, tokens)

    def _held_weights(self, program: CompiledProgram, args: Arguments) -> Weights:
        """Weights of a call; they are read again once they lie elsewhere or were written to."""
        state = []
        for meaning in sorted(WEIGHTS):
            handle = args.handles[meaning]
            for chip, shard in zip(self._chips, getattr(handle, "shards", (handle,)), strict=True):
                state.append((shard.data_ptr, chip.versions[chip.base(shard.data_ptr, meaning)]))
        if self._weights is None or self._weights[0] != state:
            staged = {meaning: args.held[meaning] for meaning in WEIGHTS}
            self._weights = state, read_weights(program.contract, staged)
        return self._weights[1]

    def _recorded(self) -> _Recorded:
        return _Recorded(self._log)


class _Recorded:
    """Writes wrong arguments down on their way out."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ContractError):
            self._log.write("violations", str(error))


_RESULTS = {
    "prefill": ("logits",),
    "decode": ("logits", "sampled", "next_hidden"),
    "topk_select": ("topk_values", "topk_indices"),
}
"""What each program writes, by meaning."""
