# SPDX-License-Identifier: Apache-2.0
"""Links between pipeline stages: hidden states of a step, from each rank to the same rank of the next stage.

A message is the number of the step, the raw elements [n, hidden] float32 of the step's tokens, and the rest in
msgpack; both sides know the width from the model.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import msgspec
import torch
import zmq
from torch import Tensor

from pagoda.ipc.addresses import allow_ipv6
from pagoda.ipc.curve import encrypt_client, encrypt_server
from pagoda.ipc.door import guard, pieces
from pagoda.messages.worker import LostSegments, StepPlan
from pagoda.messages.worker_config import CurveKeys
from pagoda.worker.step_clock import StepTimes

_STEP_BYTES = 8


@dataclass(frozen=True)
class StageState:
    """Result of a stage for a step, as the next stage needs it."""

    hidden: Tensor
    """[n, hidden] float32 of the step's tokens."""
    expert_tokens: list[int]
    """Tokens given to each expert, in all layers so far; empty without experts."""
    times: StepTimes
    """Times of this stage and all before it, without the ways between them."""
    lost: dict[int, LostSegments] = field(default_factory=dict)
    """Slots of which a cold segment could not be read, and why."""


class StageInput:
    """Receiver of hidden states, bound to `address`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        keys: CurveKeys | None,
        *,
        hidden_size: int,
    ) -> None:
        """Binds `address`, whose port may be `*`. With `keys`, `context` must have an authenticator."""
        self._hidden_size = hidden_size
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            encrypt_server(self.socket, keys)
            guard(self.socket)
        allow_ipv6(self.socket, address)
        self.socket.bind(address)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, plan: StepPlan) -> StageState:
        """Waits for what the stage before computed of the plan's tokens.
        Raises ValueError: what comes is not of this step; the stages disagree."""
        step, *parts, rest = self.socket.recv_multipart(copy=False)
        number = int.from_bytes(step.bytes, "little")
        if number != plan.step:
            raise ValueError(f"Hidden states of step {number} came for step {plan.step}.")
        buffers = [part.buffer for part in parts]
        elements = buffers[0] if len(buffers) == 1 else bytearray().join(buffers)
        hidden = torch.frombuffer(elements, dtype=torch.float32)
        if hidden.data_ptr() % hidden.element_size():
            hidden = hidden.clone()  # small messages lie anywhere in what was read from the wire
        if hidden.numel() != sum(plan.num_tokens) * self._hidden_size:
            raise ValueError(
                f"{hidden.numel()} elements came for the {sum(plan.num_tokens)} tokens of step {plan.step}."
            )
        told = msgspec.msgpack.decode(
            rest.buffer, type=tuple[list[int], StepTimes, dict[int, LostSegments]]
        )
        return StageState(hidden.view(-1, self._hidden_size), *told)


class StageOutput:
    """Sender of hidden states to the next stage."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: CurveKeys | None
    ) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            encrypt_client(self._socket, keys)
        allow_ipv6(self._socket, address)
        self._is_between_hosts = keys is not None
        self._socket.connect(address)

    def send(self, step: int, state: StageState) -> None:
        """Copies the hidden states to the host: the next step may overwrite them before they are on the wire."""
        contiguous = state.hidden.cpu().contiguous()
        elements = (ctypes.c_char * contiguous.nbytes).from_address(contiguous.data_ptr())
        rest = msgspec.msgpack.encode((state.expert_tokens, state.times, state.lost))
        parts = pieces(memoryview(elements).cast("B")) if self._is_between_hosts else [elements]
        self._socket.send_multipart([step.to_bytes(_STEP_BYTES, "little"), *parts, rest])
