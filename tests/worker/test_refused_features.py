# SPDX-License-Identifier: Apache-2.0
"""Pairs of features that do not go together are refused by the sentences that docs/combinations.md names."""

from __future__ import annotations

from pathlib import Path

import pytest
from feature_sets import refusal_of

from tools.features import FEATURES, REFUSED

PAIRS = [
    tuple(sorted(it, key=FEATURES.index)) for it in REFUSED if it.isdisjoint({"pypto", "cuda"})
]


@pytest.mark.parametrize("features", PAIRS, ids=" and ".join)
def test_refused_features(features: tuple[str, str], tmp_path: Path) -> None:
    assert REFUSED[frozenset(features)].sentence in refusal_of(features, tmp_path)
