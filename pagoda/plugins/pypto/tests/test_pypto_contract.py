# SPDX-License-Identifier: Apache-2.0
"""Contracts are read as libraries say them, and what differs is named in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagoda.backend.base import UnsupportedError
from pagoda.plugins.pypto.contract import Argument, read_manifest


@pytest.fixture
def data(install: object) -> dict[str, Any]:
    """The manifest of Qwen3-14B's contract, to be changed."""
    assert install is not None
    from pagoda_pypto_device.contracts import manifest

    return manifest(("qwen3-14b-2l",), 1)


def test_the_contract_of_qwen3_14b_says_what_kernels_take(data: dict[str, Any]) -> None:
    (contract,) = read_manifest(data).contracts
    assert contract.weight_dtype is torch.bfloat16
    assert [len(program.args) for program in contract.programs.values()] == [25, 25, 4]
    sizes = contract.environment(batch=16, tokens=300, pages=50)
    shapes = {arg.name: arg.dims(sizes) for arg in contract.programs["prefill"].args}
    assert shapes["input_ids"] == shapes["slot_mapping"] == (300,)
    assert shapes["block_table"] == (16 * 32,)
    assert shapes["k_cache"] == shapes["v_cache"] == (2 * 50 * 8 * 128, 128)
    assert shapes["wq"] == shapes["wo"] == (2 * 5120, 5120)
    assert shapes["wk"] == (2 * 5120, 1024)
    assert shapes["w_down"] == (2 * 17408, 5120)
    assert shapes["lm_head_weight"] == (152064, 5120)
    assert shapes["out"] == (16, 152064)
    decode = contract.programs["decode"]
    assert decode.argument("tokens").dims(sizes) == (16, 8)
    assert decode.argument("keys").dims(sizes, chips=2) == (2 * 50 * 4 * 128, 128)
    assert decode.argument("w_q").dims(sizes, chips=2) == (2 * 5120, 2560)
    select = contract.programs["topk_select"]
    assert select.argument("topk_indices").dims(sizes) == (16, 32)


def _renamed(data: dict[str, Any]) -> None:
    data["contracts"][0]["programs"]["prefill"]["args"][0]["meaning"] = "hidden_states"


def _without_embedding(data: dict[str, Any]) -> None:
    args = data["contracts"][0]["programs"]["prefill"]["args"]
    args[:] = [arg for arg in args if arg["meaning"] != "embedding"]


def _without_size(data: dict[str, Any]) -> None:
    del data["contracts"][0]["sizes"]["I"]


def _of_a_size(data: dict[str, Any]) -> None:
    data["contracts"][0]["programs"]["decode"]["args"][1]["shape"] = ["L*H", "N"]


def _of_three_chips(data: dict[str, Any]) -> None:
    data["contracts"][0]["topologies"][0]["chips"] = 3


def _without_topologies(data: dict[str, Any]) -> None:
    data["contracts"][0]["topologies"] = []


def _of_version_2(data: dict[str, Any]) -> None:
    data["schema_version"] = 2


def _without_decode(data: dict[str, Any]) -> None:
    del data["contracts"][0]["programs"]["decode"]


def _without_contracts(data: dict[str, Any]) -> None:
    data["contracts"] = []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _of_version_2,
            "pagoda-pypto-device 1.0 has contracts of version 2, this Pagoda reads version 1; "
            "install versions that go together",
        ),
        (
            _renamed,
            "the contracts of pagoda-pypto-device 1.0 cannot be read: Invalid enum value 'hidden_states'",
        ),
        (
            _without_embedding,
            "the contract qwen3-14b-2l of pagoda-pypto-device 1.0 has a program prefill of other arguments "
            "(embedding)",
        ),
        (_without_size, "names no size I"),
        (_of_a_size, "has decode.wq with the unknown size N"),
        (_of_three_chips, "of which 3 chips have no equal parts"),
        (_without_decode, "has no program decode"),
        (_without_topologies, "has no topologies, so it runs on no number of chips"),
        (_without_contracts, "pagoda-pypto-device 1.0 has no contracts"),
    ],
)
def test_what_differs_is_named(
    data: dict[str, Any], change: Callable[[dict[str, Any]], None], message: str
) -> None:
    change(data)
    with pytest.raises(ValueError, match="contract") as caught:
        read_manifest(data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_number_of_chips_that_programs_do_not_run_on_is_refused(data: dict[str, Any]) -> None:
    (contract,) = read_manifest(data).contracts
    assert contract.topology(2).ring_task_window == 2048
    with pytest.raises(
        UnsupportedError, match=r"run on 1, 2 chips, but --devices gives a rank 4\."
    ):
        contract.topology(4)


def test_shapes_are_products_of_symbols_and_numbers() -> None:
    argument = Argument("x", "bf16", ("L*2", "H"), "w_q", split="H")
    assert argument.dims({"L": 3, "H": 8}, chips=4) == (6, 2)
