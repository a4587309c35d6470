"""Waiting of the worker's OpenMP threads for each other. OpenMP reads the policy once, when torch loads it."""

from __future__ import annotations

from collections.abc import MutableMapping

SPIN_COUNT = "2000"
"""Some fifty microseconds: the threads of one step wait for each other awake, those of an idle worker sleep."""


def set_thread_waiting(environ: MutableMapping[str, str]) -> None:
    """Says it in the environment, unless the operator did.

    Between two operations of a step a wait is shorter than falling asleep and waking up. Spinning on for longer
    would take the cores from engine and frontend.
    """
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
