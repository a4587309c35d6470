# SPDX-License-Identifier: Apache-2.0
"""The command `pagoda`: which commands there are, and how it ends.

A command's module is imported when the command is called or asked for its help, so that
`pagoda --help` is quick.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

from cyclopts import App, ArgumentCollection, CoercionError, CycloptsError, Group, Parameter
from cyclopts.config import Dict, Env

from pagoda.cli.command import Command, CommandPlugin
from pagoda.errors import ConfigError, EngineDeadError, PagodaError
from pagoda.files import read_file
from pagoda.registry import COMMANDS, load_all
from pagoda.version import __version__

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_ENV_PREFIX = "PAGODA_"

_CORE = {
    "serve": Command(
        "Serve a model over the APIs of OpenAI, Anthropic and Ollama.", "pagoda.cli.serve:serve"
    ),
    "generate": Command(
        "Answer prompts, or the lines of an OpenAI batch file.", "pagoda.cli.generate:generate"
    ),
    "chat": Command("Talk with a model in the terminal.", "pagoda.cli.chat:chat"),
    "models": Command(
        "List the models that can be served here by name, with their sizes.",
        "pagoda.cli.models:models",
    ),
    "doctor": Command(
        "Show what this machine has, and what Pagoda will use.", "pagoda.cli.doctor:doctor"
    ),
    "demo": Command(
        "Start a server, ask it a few questions over HTTP, show answers and figures.",
        "pagoda.cli.demo:demo",
    ),
    "keys": Command("API keys in a file, as serve --api-keys-file takes it."),
    "keys add": Command(
        "Make a key, print it, and add its digest to a file.", "pagoda.cli.keys:add"
    ),
    "keys list": Command(
        "List the keys in a file: names, scopes, weights and limits.", "pagoda.cli.keys:list"
    ),
    "keys revoke": Command("Remove a key from a file.", "pagoda.cli.keys:revoke"),
}
"""Commands by their words; a group comes before its members."""


def _commands(first: str) -> dict[str, Command]:
    """The commands of the core; unless one of them is the `first` word, those of plugins, too.
    Raises ConfigError: a plugin has a command that others have."""
    found = dict(_CORE)
    if first in found:
        return found
    for name, plugin in load_all(COMMANDS, CommandPlugin).items():
        taken = found.keys() & plugin.commands.keys()
        if taken:
            raise ConfigError(
                f"{name} has the commands {', '.join(sorted(taken))}, which others have."
            )
        found |= plugin.commands
    return found


def build_app(first: str = "") -> App:
    """The command line for words of which this is the `first`.

    A flag wins over the environment, the environment over `--config`.
    """
    app = App(
        name="pagoda",
        help="Serves large language models over the APIs of OpenAI, Anthropic and Ollama.",
        help_epilogue="Any flag may also stand in a YAML file (--config) or in the environment, "
        "such as PAGODA_MAX_MODEL_LEN for --max-model-len.",
        version=__version__,
        config=(Env(_ENV_PREFIX, command=False, show=False), read_config_file),
        # Scripts append their flags to those of others: the last one wins. Flags of several values collect them.
        default_parameter=Parameter(allow_repeating=True),
        group_commands=Group.create_ordered("Commands"),
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    commands = _commands(first)
    for words, command in commands.items():
        group, _, name = words.rpartition(" ")
        parent = app[group] if group else app
        text = "\n\n".join(filter(None, (command.summary, command.details)))
        if any(other.startswith(f"{words} ") for other in commands):
            members = App(name=name, help=text)
            if command.target and words == first:
                members.default(resolve_name(command.target))
            parent.command(members)
        else:
            parent.command(command.target, name=name, help=text)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code of the process.

    0 is success, 1 a failure that is no fault of the user's, 2 a mistake in what was asked, 130 an
    interrupt. Mistakes are one sentence on standard error, never a traceback.
    """
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = build_app(*tokens[:1])(tokens, exit_on_error=False, print_error=False)
        return code if isinstance(code, int) else 0
    except CoercionError as error:
        return _complain(str(error) + _hint(error), EXIT_USAGE)
    except CycloptsError as error:
        return _complain(str(error), EXIT_USAGE)
    except EngineDeadError as error:
        return _complain(str(error), EXIT_FAILED)
    except PagodaError as error:
        return _complain(str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes standard output once more at exit; that must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _hint(error: CoercionError) -> str:
    """The flag that a value of another one was probably meant for."""
    from pagoda.llm.flag_hints import hint

    if error.argument is None or error.token is None:
        return ""
    return hint(error.argument.name, error.token.value)


def _complain(sentence: str, code: int) -> int:
    print(f"pagoda: {' '.join(sentence.split())}", file=sys.stderr)
    return code


_FLAG = "--config"


def read_config_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """A cyclopts config source: adds the file's values to arguments that nothing else has set.

    Raises ConfigError if the file cannot be read, is not a mapping of flags, or names an unknown flag.
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
    given = {
        key: json.dumps(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }
    source = Dict(given, source=str(path), use_commands_as_keys=False)
    source(app, commands, arguments)


def _spelling(name: str) -> str:
    return name.lstrip("-").lower().replace("-", "_")


def _load(path: Path) -> dict[str, object]:
    import yaml

    try:
        values = yaml.safe_load(read_file(path, _FLAG))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{_FLAG}: {path} is not valid YAML{line}.") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{_FLAG}: {path} must hold one 'flag: value' a line.")
    return values
