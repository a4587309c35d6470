# SPDX-License-Identifier: Apache-2.0
"""What transformers answers, kept: what a model has answered to a prompt once it need not answer again.

Answers are kept by all that determines them: the model's class, configuration and weights, the prompt, the number
of tokens, and the version of transformers. Those in the repository are of one version; others go to the user's
cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("answers.json")
NOT_OF_ANSWERS = {"architectures", "transformers_version", "_name_or_path", "dtype"}
"""Fields of a configuration that saving a model changes, and that weights say."""


def user_cache() -> Path:
    """Directory of what this user's runs have kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "pagoda-tests" / "answers"


class KeptAnswers:
    """Answers in the repository and in the user's cache."""

    def __init__(self, file: Path = FILE, cache: Path | None = None) -> None:
        self._file, self._cache = file, cache or user_cache()
        self._of_repository: dict[str, dict[str, list[int]]] | None = None
        self.anew = False
        """Answers that are kept do not count."""
        self.added: dict[str, list[int]] = {}
        """Answers that were computed anew, by their keys."""

    def find(self, version: str, key: str, compute: Callable[[], list[int]]) -> list[int]:
        """The answer of that key; `compute` says it if nothing that is kept does."""
        if self.anew:
            if key not in self.added:
                self.added[key] = compute()
            return self.added[key]
        kept = self._read().get(version, {}).get(key)
        path = self._cache / f"{key}-{version}.json"
        if kept is None and path.is_file():
            kept = json.loads(path.read_bytes())
        if kept is None:
            kept = compute()
            _write_whole(path, json.dumps(kept))
        return list(kept)

    def keep(self, version: str, added: Mapping[str, list[int]]) -> None:
        """Writes answers into the repository, beside those of this version that it has."""
        answers = self._read().get(version, {}) | added
        lines = ",\n".join(f'"{key}": {json.dumps(answers[key])}' for key in sorted(answers))
        _write_whole(self._file, f'{{"{version}": {{\n{lines}\n}}}}\n')
        self._of_repository = None

    def _read(self) -> dict[str, dict[str, list[int]]]:
        if self._of_repository is None:
            self._of_repository = json.loads(self._file.read_bytes()) if self._file.exists() else {}
        return self._of_repository


ANSWERS = KeptAnswers()


def key_of(model: Any, prompt: list[int], count: int) -> str:
    """Everything about a model of transformers and a question that its greedy answer depends on, as 16 digits."""
    fields = {
        name: value for name, value in model.config.to_dict().items() if name not in NOT_OF_ANSWERS
    }
    digest = hashlib.sha256(
        json.dumps(
            [type(model).__name__, fields, prompt, count], default=str, sort_keys=True
        ).encode()
    )
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().float().numpy().tobytes())
    return digest.hexdigest()[:16]


def _write_whole(path: Path, text: str) -> None:
    """Writes a file that nobody sees in part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
        os.fchmod(file.fileno(), 0o644)
    Path(file.name).replace(path)
