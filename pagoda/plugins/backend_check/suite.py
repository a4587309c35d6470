# SPDX-License-Identifier: Apache-2.0
"""All checks, in order, and their outcome line by line."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pagoda.backend.base import Backend
from pagoda.backend.operations import OPERATIONS
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.devices import DeviceSet, find_backend
from pagoda.messages.worker import Capabilities
from pagoda.parallel.collectives import Alone, HostGroup
from pagoda.plugins.backend_check import (
    attention,
    contexts,
    family_rows,
    graphs,
    kv_store,
    latents,
    memory,
    products,
    rows,
    sampling,
    serving,
    states,
)
from pagoda.plugins.backend_check.subject import Check, FailedError, LackingError, Subject, ensure

_EXPLICIT = {
    **rows.EXPLICIT,
    **products.EXPLICIT,
    **attention.EXPLICIT,
    **latents.EXPLICIT,
    **states.EXPLICIT,
    **family_rows.EXPLICIT,
    **graphs.EXPLICIT,
    **contexts.EXPLICIT,
}


@dataclass(frozen=True)
class Outcome:
    check: str
    verdict: str
    """`ok`, `lacks` or `FAILED`."""
    detail: str

    def __str__(self) -> str:
        return f"{self.verdict:6}  {self.check}: {self.detail}"


def open_subject(name: str) -> Subject:
    """The backend of a name, on its first devices.

    Raises ConfigError: there is no such backend, BackendUnavailableError: this machine does not have it.
    """
    entry = find_backend(name)
    open_backend = importlib.import_module(entry.module).open_backend

    def opened(group: HostGroup) -> Backend[Any, Any]:
        backend: Backend[Any, Any] = open_backend(DeviceSet(entry.device_kind, (group.rank,)))
        if group.size > 1:
            backend.join(group)
        return backend

    return Subject(name, entry, opened, opened(Alone()), ReferenceBackend())


def operation_checks() -> dict[str, Check | None]:
    """The check of each operation; None of those that none computes."""
    return {name: _EXPLICIT.get(name) or rows.row_check(name) for name in OPERATIONS}


def checks() -> list[Check]:
    of_operations = [check for check in operation_checks().values() if check is not None]
    found = [
        Check("capabilities", _capabilities),
        *of_operations,
        *products.format_checks(),
        products.ANY_ROWS,
        products.QUANTIZE,
        *attention.FURTHER,
        *latents.FURTHER,
        *kv_store.FURTHER,
        *graphs.FURTHER,
        *memory.FURTHER,
        *sampling.FURTHER,
        *serving.FURTHER,
    ]
    return list({check.name: check for check in found}.values())


def outcomes(subject: Subject, chosen: Sequence[Check] | None = None) -> Iterator[Outcome]:
    """The outcome of each check, as it is known; what a backend raises fails the check."""
    for check in checks() if chosen is None else chosen:
        yield Outcome(check.name, *_run(check.run, subject))


def _run(run: Callable[[Subject], str], subject: Subject) -> tuple[str, str]:
    try:
        return "ok", run(subject)
    except LackingError as error:
        return "lacks", str(error)
    except FailedError as error:
        return "FAILED", str(error)
    except Exception as error:
        return "FAILED", f"{type(error).__name__}: {' '.join(str(error).split())}"


_LIMITS = (
    *("max_batch_tokens", "max_batch_seqs", "max_model_len", "batch_multiple", "max_experts"),
    *("max_conv_width", "max_delta_key_dim", "delta_key_multiple", "max_scan_state"),
)


def _capabilities(subject: Subject) -> str:
    """Capabilities are complete, and within what exists."""
    own, known = subject.backend.capabilities, subject.reference.capabilities
    ensure(isinstance(own, Capabilities), f"capabilities are {own!r}, not Capabilities")
    for name in ("block_sizes", "weight_formats", "kv_cache_dtypes"):
        values, allowed = getattr(own, name), getattr(known, name)
        ensure(len(values) > 0, f"{name} is empty")
        others = [value for value in values if value not in allowed]
        ensure(name == "block_sizes" or not others, f"{name} names {others}; there is {allowed}")
    for name in _LIMITS:
        limit = getattr(own, name)
        ensure(limit is None or limit > 0, f"{name} is {limit}")
    unknown = [name for name in own.lacks_operations if name not in OPERATIONS]
    ensure(not unknown, f"lacks_operations names {', '.join(unknown)}, which are no operations")
    ensure(bool(subject.backend.arithmetic), "arithmetic has no name")
    lacking = len(own.lacks_operations)
    return (
        f"{subject.backend.arithmetic}, {len(OPERATIONS) - lacking} of {len(OPERATIONS)} operations"
    )
