# SPDX-License-Identifier: Apache-2.0
"""A tier of another package is found by its entry point, in the frontend and in the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from kv_tiers import READY

from pagoda.ipc.clock import MonotonicClock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.tiers import build_tiers
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.engine_config import KVTiersConfig
from pagoda.messages.transfers import TierPlace
from pagoda.messages.worker_config import KVTierConfig

PACKAGE = """
from dataclasses import dataclass
from pagoda.kv.plugin import KVTierPlugin
from pagoda.messages.worker_config import KVTierConfig

@dataclass(frozen=True, kw_only=True)
class Options:
    kv_far_path: str | None = None

def configure(options, model):
    return KVTierConfig(options.kv_far_path, 7, {"model": model})

def open_tier(context):
    from scripted_tier import ScriptedTier
    return ScriptedTier(context.config.path, context.ledger)

TIER = KVTierPlugin(
    options="far_tier:Options",
    configure="far_tier:configure",
    engine_half="far_tier:open_tier",
    worker_half="far_tier:not_here",
)
"""
ASK = (
    "from pagoda.llm.engine_options import EngineOptions; "
    "print(EngineOptions(kv_far_path='there').engine_config('m').kv_tiers.further, "
    "EngineOptions().engine_config('m').kv_tiers)"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    metadata = tmp_path / "far_tier-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: far_tier\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[pagoda.kv_tiers]\nfar = far_tier:TIER\n")
    (tmp_path / "far_tier.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_options_of_a_tier_are_those_of_the_engine(package: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=os.environ | {"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == f"{ {'far': KVTierConfig('there', 7, {'model': 'm'})} } None", (
        done
    )


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("tier", "names"), [("far", ["host", "there"]), ("other", ["host"])])
def test_tiers_with_places_lie_behind_host_memory(tier: str, names: list[str]) -> None:
    pool = BlockPool(8)
    tiers = build_tiers(
        KVTiersConfig(further={"far": KVTierConfig("there", 7)}),
        msgspec.structs.replace(READY, kv_places=(TierPlace(tier, "there", 1),)),
        pool,
        TransferLedger(pool),
        MonotonicClock(),
    )
    assert tiers is not None
    assert [connector.tier for connector in tiers.connectors] == names
