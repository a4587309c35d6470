"""Files of sentence-transformers beside a model: how its hidden states become the vector of a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pagoda.errors import ConfigError
from pagoda.messages.frontend import Pooling

_MODULE_KINDS = ("Transformer", "Pooling", "Normalize")
_MODES = {
    "pooling_mode_lasttoken": Pooling.LAST,
    "lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "mean": Pooling.MEAN,
}
"""Keys of older and values of newer files."""


@dataclass(frozen=True)
class PoolingDefaults:
    """Pooling of a model without such files: that of most decoders that embed texts."""

    pooling: Pooling = Pooling.LAST
    normalize: bool = True


class _Module(msgspec.Struct, frozen=True):
    type: str
    path: str = ""


def read_pooling(directory: Path) -> PoolingDefaults:
    """Pooling as `modules.json` and the files that it names say, or the default where there is no such file.
    Raises ConfigError: a file cannot be read, or says what Pagoda does not do; names the file."""
    path = directory / "modules.json"
    if not path.is_file():
        return PoolingDefaults()
    pooling, normalize = Pooling.LAST, False
    for module in _read(path, list[_Module]):
        kind = module.type.rpartition(".")[2]
        if kind not in _MODULE_KINDS:
            raise ConfigError(
                f"{str(path)!r} has a module {module.type!r}; only {', '.join(_MODULE_KINDS)} are supported."
            )
        normalize |= kind == "Normalize"
        if kind == "Pooling":
            pooling = _mode(directory / module.path / "config.json")
    return PoolingDefaults(pooling, normalize)


def _mode(path: Path) -> Pooling:
    fields = _read(path, dict[str, Any])
    wanted = [
        name for name, value in fields.items() if name.startswith("pooling_mode_") and value is True
    ]
    if "pooling_mode" in fields:
        wanted = [str(fields["pooling_mode"])]
    if len(wanted) != 1 or wanted[0] not in _MODES:
        raise ConfigError(
            f"{str(path)!r} must ask for one of the last token and the mean, not {wanted}."
        )
    return _MODES[wanted[0]]


def _read(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}.") from None
