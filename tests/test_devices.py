"""The registry of backends and of the devices that they compute on."""

from __future__ import annotations

from importlib.util import find_spec
from typing import get_args

import pytest

from pagoda.devices import (
    BACKENDS,
    BackendName,
    check_devices,
    default_device,
    device_number,
)
from pagoda.errors import ConfigError


def test_the_flag_names_every_backend() -> None:
    assert get_args(BackendName) == ("auto", *BACKENDS)
    assert all(find_spec(entry.module) is not None for entry in BACKENDS.values())


def test_devices_are_of_a_kind_that_a_backend_computes_on() -> None:
    check_devices(["cpu:0", default_device(3)])
    assert device_number("cpu:12") == 12
    with pytest.raises(ConfigError) as caught:
        check_devices(["cpu:0", "cuda:1"])
    assert str(caught.value) == (
        "--devices names cuda:1, but no backend computes there; name cpu devices."
    )
