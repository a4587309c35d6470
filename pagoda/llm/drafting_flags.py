# SPDX-License-Identifier: Apache-2.0
"""Flags of llama.cpp and SGLang that say in parts what `--speculative-config` says."""

from __future__ import annotations

import json

from pagoda.errors import ConfigError
from pagoda.messages.speculation import Method

METHODS: dict[str, Method] = {
    "none": "off",
    "draft-simple": "draft_model",
    "draft-mtp": "mtp",
    "draft-eagle3": "eagle3",
    "ngram-simple": "ngram",
    "ngram-map-k": "ngram",
    "ngram-mod": "suffix",
    "ngram-cache": "suffix",
    "NGRAM": "ngram",
    "STANDALONE": "draft_model",
    "NEXTN": "mtp",
    "EAGLE3": "eagle3",
}
"""Values of llama.cpp's `--spec-type`, and in capitals of SGLang's `--speculative-algorithm`."""


def config_of_flags(
    spec_type: str | None, model_draft: str | None, draft_max: int | None, config: str | None
) -> str | None:
    """The text of `--speculative-config` that these flags stand for; `config` where none is given.

    Raises ConfigError: a method is unknown, or both ways are gone."""
    named = {"--spec-type": spec_type, "--model-draft": model_draft, "--draft-max": draft_max}
    given = [flag for flag, value in named.items() if value is not None]
    if not given:
        return config
    if config is not None:
        raise ConfigError(
            f"{given[0]} says a part of --speculative-config; give one of them, not both."
        )
    if spec_type is not None and spec_type not in METHODS:
        raise ConfigError(
            f"--spec-type (--speculative-algorithm) must be one of {', '.join(METHODS)}, got {spec_type!r}."
        )
    said = {
        "method": METHODS[spec_type] if spec_type is not None else None,
        "model": model_draft,
        "num_speculative_tokens": draft_max,
    }
    return json.dumps({key: value for key, value in said.items() if value is not None})
