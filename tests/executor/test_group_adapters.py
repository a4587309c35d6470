# SPDX-License-Identifier: Apache-2.0
"""Adapters of several ranks: a load ends once on all of them, whatever becomes of the workers meanwhile."""

from __future__ import annotations

from pagoda.executor.group_adapters import GroupAdapters
from pagoda.messages.adapters import Adapter, AdapterLoaded

ONE, TWO = (Adapter(name, f"/{name}", f"digest of {name}") for name in ("one", "two"))
LOADED, FAILED = AdapterLoaded(TWO.digest), AdapterLoaded(TWO.digest, "it is damaged.")


def _running() -> GroupAdapters:
    adapters = GroupAdapters([ONE], num_ranks=2)
    assert adapters.start() == (ONE,)
    assert adapters.ready() == []
    assert adapters.take_orders() == []
    return adapters


def test_a_load_ends_on_the_last_rank() -> None:
    adapters = _running()
    adapters.load(TWO)
    assert adapters.take_orders() == [TWO]
    assert adapters.take_orders() == []
    assert adapters.answered(1, LOADED) is None
    assert adapters.answered(1, LOADED) is None
    assert adapters.answered(0, LOADED) == LOADED
    assert adapters.answered(0, LOADED) is None
    assert adapters.start() == (ONE, TWO)


def test_the_first_failure_ends_a_load() -> None:
    adapters = _running()
    adapters.load(TWO)
    adapters.take_orders()
    assert adapters.answered(1, FAILED) == FAILED
    assert adapters.answered(0, LOADED) is None
    adapters.unload(TWO.digest)
    assert adapters.start() == (ONE,)


def test_a_load_outlives_its_workers() -> None:
    adapters = _running()
    adapters.load(TWO)
    adapters.take_orders()
    assert adapters.answered(0, LOADED) is None
    assert adapters.start() == (ONE, TWO)  # the workers were lost
    assert adapters.ready() == [LOADED]
    assert adapters.take_orders() == []
    assert adapters.ready() == []


def test_a_load_that_comes_while_workers_start() -> None:
    adapters = GroupAdapters([ONE], num_ranks=1)
    adapters.start()
    adapters.load(TWO)
    assert adapters.ready() == []
    assert adapters.take_orders() == [TWO]
    assert adapters.answered(0, LOADED) == LOADED


def test_an_adapter_that_comes_back_is_loaded_again() -> None:
    adapters = _running()
    adapters.unload(ONE.digest)
    assert adapters.start() == ()
    adapters.load(ONE)
    assert adapters.take_orders() == [ONE]
