# SPDX-License-Identifier: Apache-2.0
"""Without package, device, right driver or right contracts there is one sentence that says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagoda.devices import BackendUnavailableError, DeviceSet
from pagoda.errors import ConfigError
from pagoda.plugins.pypto.backend import open_backend
from pagoda.worker.backends import choose_backend, first_device

NPU_0 = DeviceSet("npu", (0,))


def test_without_the_package() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_backend("pypto")
    assert str(caught.value) == (
        "--backend pypto is not available: no installed package brings PyPTO kernels (an entry point of the group "
        "pagoda.pypto_kernels), and PYPTO_LIB_ROOT names no checkout of pypto-lib."
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"driver": None},
            "there is no Ascend driver here (/dev/davinci_manager is missing)",
        ),
        (
            {"driver": "24.1.0"},
            "pagoda-pypto-device 1.0 needs an Ascend driver from 25.2 to below 26, this host has 24.1.0",
        ),
        ({"driver": "26.0"}, "from 25.2 to below 26, this host has 26.0"),
        (
            {"schema_version": 3},
            "pagoda-pypto-device 1.0 has contracts of version 3, this Pagoda reads version 1; "
            "install versions that go together",
        ),
        ({"chips": 0}, "--devices names npu:0, but this host has no chip"),
    ],
)
def test_what_the_machine_lacks_is_said(
    install: Callable[..., None], settings: dict[str, object], message: str
) -> None:
    install(**settings)
    with pytest.raises(BackendUnavailableError) as caught:
        open_backend(NPU_0)
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="--backend pypto is not available: ") as refused:
        choose_backend("pypto", first_device)
    assert message in str(refused.value)


def test_chips_that_are_not_there_are_refused(install: Callable[..., None]) -> None:
    install(chips=2)
    with pytest.raises(BackendUnavailableError, match="has chips npu:0 to npu:1"):
        open_backend(DeviceSet("npu", (1, 2)))


def test_limits_are_those_of_all_contracts(install: Callable[..., None]) -> None:
    install(contracts=["tiny-bf16", "qwen3-small"])
    backend = open_backend(NPU_0)
    own = backend.capabilities
    assert own.block_sizes == (128,)
    assert (own.max_batch_seqs, own.max_model_len, own.max_batch_tokens) == (16, 1024, 4096)
    assert own.weight_formats == own.kv_cache_dtypes == ("bfloat16",)
    assert not own.mixed_steps
    assert own.whole_models
    assert backend.arithmetic == "pypto (1 chip, pagoda-pypto-device 1.0)"
    assert not backend.memory.on_host
    assert backend.memory.free_bytes() == 1 << 30
    assert backend.memory.taken_bytes() == 0
