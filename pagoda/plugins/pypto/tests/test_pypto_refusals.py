# SPDX-License-Identifier: Apache-2.0
"""Features that do not go with PyPTO are refused by the sentences that docs/combinations.md names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from feature_models import TOKENIZER
from feature_sets import Featured, refusal_of

from pagoda.devices import check_backend
from pagoda.errors import ConfigError
from pagoda.messages.speculation import SpeculativeConfig
from tools.features import FEATURES, REFUSED

OTHERS = [
    other
    for other in FEATURES
    if frozenset(("pypto", other)) in REFUSED and other not in ("MTP", "EAGLE-3")
]


@pytest.mark.parametrize("other", OTHERS)
def test_what_does_not_go_with_pypto(
    other: str, install: Callable[..., None], tmp_path: Path
) -> None:
    install()
    if other.endswith("parallelism"):
        with pytest.raises(ConfigError) as caught:
            check_backend("pypto", [], 2)
        said = str(caught.value)
    elif other in (
        "suffix",
        "ngram",
    ):  # which engines refuse, once a model that PyPTO has programs for is loaded
        numbers = {"block_size": 128, "dtype": "float32"}
        method = SpeculativeConfig(method=other)  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as caught:
            Featured(TOKENIZER.parent, "pypto", method, numbers, ()).featured()
        said = str(caught.value)
    else:
        said = refusal_of(("pypto", other), tmp_path)
    assert REFUSED[frozenset(("pypto", other))].sentence in said
