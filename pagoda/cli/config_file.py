"""`--config FILE`: the flags of a command from a YAML file.

Keys are the flags' names without the leading dashes, with `-` or `_`. A key that the command does
not have is refused by name, so that a misspelt one is never silently ignored.
"""

from __future__ import annotations

from pathlib import Path

from cyclopts import App, ArgumentCollection
from cyclopts.config import Dict

from pagoda.errors import ConfigError

_FLAG = "--config"


def read_config_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """A cyclopts config source: adds the file's values to arguments that nothing else has set.

    Raises:
        ConfigError: the file cannot be read, is not a mapping of flags, or names an unknown flag.
    """
    flag = next((argument for argument in arguments if argument.name == _FLAG), None)
    if flag is None or not flag.tokens:
        return
    path = Path(flag.tokens[-1].value)
    names = {_spelling(name) for argument in arguments for name in argument.names}
    values = _load(path)
    for key in values:
        if _spelling(key) not in names - {_spelling(_FLAG)}:
            raise ConfigError(f"{path}: {key} is not a flag of 'pagoda {' '.join(commands)}'.")
    given = {key: value for key, value in values.items() if value is not None}
    source = Dict(given, source=str(path), use_commands_as_keys=False)
    source(app, commands, arguments)


def _spelling(name: str) -> str:
    return name.lstrip("-").lower().replace("-", "_")


def _load(path: Path) -> dict[str, object]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{_FLAG}: cannot read {path}: {reason}.") from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{_FLAG}: {path} is not valid YAML{line}.") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{_FLAG}: {path} must hold one 'flag: value' a line.")
    return values
