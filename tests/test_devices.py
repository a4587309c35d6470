# SPDX-License-Identifier: Apache-2.0
"""The registry of backends and of the devices that they compute on."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pagoda.devices import (
    AUTO_ORDER,
    DeviceSet,
    check_backend,
    check_devices,
    find_backend,
    registered_backends,
    with_kind,
)
from pagoda.errors import ConfigError
from pagoda.llm.engine_options import ParallelOptions
from pagoda.llm.llm_arguments import configure
from pagoda.parallel.config import ParallelConfig, RankPlace


def _installed(directory: Path, name: str, package: str = "pagoda-npu", **entry: object) -> None:
    """A package that brings a backend, as an installer leaves it in a directory of the path."""
    module = package.replace("-", "_")
    fields = ", ".join(f"{key}={value!r}" for key, value in entry.items())
    source = f"from pagoda.devices import BackendEntry\nENTRY = BackendEntry({fields})\n"
    (directory / f"{module}.py").write_text(source)
    about = directory / f"{module}-1.2.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    about.joinpath("entry_points.txt").write_text(f"[pagoda.backends]\n{name} = {module}:ENTRY\n")


@pytest.fixture
def npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a backend whose ranks drive up to two devices."""
    _installed(
        tmp_path,
        "npu",
        "pagoda-npu-" + tmp_path.name.replace("_", "-"),
        module="pagoda_npu.backend",
        device_kind="npu",
        max_devices=2,
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "npu"


def test_the_backends_of_pagoda_are_registered() -> None:
    assert {*AUTO_ORDER} <= registered_backends().keys()
    assert all(find_spec(find_backend(name).module) is not None for name in AUTO_ORDER)


def test_a_package_brings_a_backend(npu: str) -> None:
    assert registered_backends()[npu][0].endswith(" 1.2")
    assert find_backend(npu).device_kind == "npu"
    assert "pagoda_npu.backend" not in sys.modules
    check_backend(npu, ["npu:0+npu:1", "npu:2+npu:3"])
    others = ", ".join(sorted({*registered_backends()} - {*AUTO_ORDER}))
    assert npu in others.split(", ")
    with pytest.raises(ConfigError) as caught:
        find_backend("nppu")
    assert str(caught.value) == (
        f"--backend must be one of auto, cpu, reference, {others}, got 'nppu'."
    )


def test_devices_that_a_backend_does_not_drive_are_refused(npu: str) -> None:
    for wanted, devices, message in (
        (npu, ["cpu:0"], "--devices names cpu:0, but the npu backend does not compute there; "),
        ("auto", ["npu:1"], "names npu:1, but the cpu backend does not compute there; name cpu"),
        ("cpu", ["cpu:0+cpu:1"], "but a rank of the cpu backend drives one device."),
        (npu, ["npu:0+npu:1+npu:2"], "a rank of the npu backend drives 2 devices at most."),
    ):
        with pytest.raises(ConfigError) as caught:
            check_backend(wanted, devices)
        assert message in str(caught.value)


def test_two_packages_of_one_name_are_refused(npu: str, tmp_path: Path) -> None:
    _installed(tmp_path, npu, "other-npu", module="other", device_kind="npu")
    with pytest.raises(ConfigError, match=r"--backend npu is brought by other-npu 1\.2 and pagoda"):
        find_backend(npu)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module", "cannot be imported from broken_npu:ENTRY (ModuleNotFoundError"),
        ("ENTRY = 3", "broken_npu:ENTRY must be a pagoda.devices.BackendEntry, not 3"),
    ],
)
def test_broken_entries_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    _installed(tmp_path, "broken", "broken-npu", module="x", device_kind="npu")
    (tmp_path / "broken_npu.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("broken_npu", None)
    with pytest.raises(ConfigError) as caught:
        find_backend("broken")
    assert message in str(caught.value)


def test_bare_numbers_are_of_the_kind_of_the_backend(npu: str) -> None:
    for backend, given, names in (
        (npu, ["12", "13"], ("npu:12", "npu:13")),
        (npu, ["0+1", "npu:2+3"], ("npu:0+npu:1", "npu:2+npu:3")),
        ("auto", ["1", "cpu:0"], ("cpu:1", "cpu:0")),
        ("reference", ["0"], ("cpu:0",)),
        ("no such", ["cuda:0"], ("cuda:0",)),
    ):
        assert with_kind(given, backend) == names
    for given in ("1x", "-1", "01", "²", "1.0"):
        with pytest.raises(ConfigError, match=r"^--devices takes names such as cpu:0, or numbers,"):
            check_devices(with_kind([given], npu))
    parallel = ParallelOptions(devices="12,13", tensor_parallel_size=2)
    assert parallel.config(npu).devices == ("npu:12", "npu:13")


def test_a_backend_of_whole_replicas_takes_no_further_ranks() -> None:
    check_backend("pypto", ["npu:0+npu:1"], 1)
    check_backend("cpu", [], 2)
    with pytest.raises(
        ConfigError, match=r"^--backend pypto shares a model out .* npu:0\+npu:1\.$"
    ):
        check_backend("pypto", [], 2)
    options = {"backend": "pypto", "load_format": "dummy"}
    for size in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with pytest.raises(ConfigError, match="leave out --tensor-parallel-size"):
            configure("qwen3-0.6b", {**options, **size})


def test_devices_by_rank() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, devices=("npu:4+npu:5", "npu:6+npu:7"))
    assert parallel.devices_of(RankPlace(tp=1), "npu") == DeviceSet("npu", (6, 7))
    assert str(parallel.devices_of(RankPlace())) == "npu:4+npu:5"
    assert ParallelConfig(tensor_parallel_size=2).devices_of(RankPlace(tp=1), "npu") == DeviceSet(
        "npu", (1,)
    )


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu"], "--devices takes names such as cpu:0, or numbers, separated by commas, or by"),
        (["cpu:0", "cuda:1"], "--devices mixes cpu and cuda; name devices of one kind."),
        (["cpu:0+cuda:1"], "--devices mixes cpu and cuda; name devices of one kind."),
        (["npu:0+npu:1", "npu:1+npu:2"], "--devices names npu:1 more than once; every rank needs"),
        (["npu:0", "npu:1+npu:2"], "--devices gives some ranks more devices than others; give"),
    ],
)
def test_names_that_are_not_devices_of_ranks(devices: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_devices(devices)
    assert str(caught.value).startswith(message)


def test_the_registry_is_light() -> None:
    """Neither the command line nor the engine loads torch to check names."""
    code = (
        "import sys\n"
        "from pagoda.devices import check_backend\n"
        "check_backend('auto', ())\n"
        "assert 'pagoda.backend' not in sys.modules\n"
        "check_backend('reference', ['cpu:0'])\n"
        "assert 'torch' not in sys.modules and 'pagoda.backend' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
