# SPDX-License-Identifier: Apache-2.0
"""Modules of sentence-transformers: the steps from a text to its vector or score, the first being the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.pooling_spec import ScoreTokens
from pagoda.errors import ConfigError
from pagoda.files import read_regular

FILE = "modules.json"
_LOGIT_SCORE = "LogitScore"


class SentenceModule(msgspec.Struct, frozen=True):
    type: str
    """Class in Python, with its module."""
    path: str = ""
    """Directory of its files, within that of the model."""

    @property
    def kind(self) -> str:
        """The class alone."""
        return self.type.rpartition(".")[2]


def read_modules(directory: Path) -> Sequence[SentenceModule]:
    """The modules that `modules.json` in a model directory lists; none where there is no such file.
    Raises ConfigError: the file is damaged."""
    path = directory / FILE
    if not path.is_file():
        return ()
    try:
        return msgspec.json.decode(read_regular(path), type=list[SentenceModule])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}.") from None


def score_tokens(directory: Path, modules: Sequence[SentenceModule]) -> ScoreTokens | None:
    """The tokens whose logits are a pair's score, as the module `LogitScore` names them; None without that module.
    Raises ConfigError: its file is missing or damaged."""
    places = [module.path for module in modules if module.kind == _LOGIT_SCORE]
    if not places:
        return None
    path = directory / places[0] / "config.json"
    try:
        values = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    fields, no = Fields(values, str(path)), "false_token_id"
    return ScoreTokens(
        fields.count("true_token_id"), None if values.get(no) is None else fields.count(no)
    )
