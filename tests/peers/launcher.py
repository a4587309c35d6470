# SPDX-License-Identifier: Apache-2.0
"""A program that other servers' tests start in place of their server: `python launcher.py DIALECT ARGUMENT...`.

It becomes `pagoda serve`; its log goes to a file in the directory `PAGODA_PEERS_LOGS`. The exit code 77 says
that the server which was asked for is no part of Pagoda.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from flags import LARGEST_LEN, LLAMA_CPP, SGLANG, TINY_LEN, VLLM, NotApplicableError, translate

LOGS = "PAGODA_PEERS_LOGS"
MODEL = "PAGODA_PEERS_MODEL"
"""The variable with the directory of the model that serves; without it the embedded one does. A GGUF file in it is
what is served, the rest are the tokenizer and the configuration that tests read."""
SCRIPTED = "PAGODA_PEERS_SCRIPTED"
"""The variable that is there if the model says what is written in `script`."""
NOT_APPLICABLE = 77
DIALECTS = {"vllm": VLLM, "llamacpp": LLAMA_CPP, "sglang": SGLANG}


def command(dialect: str, arguments: Sequence[str]) -> list[str]:
    """The command of Pagoda's server. Raises NotApplicableError: as `translate`."""
    model = os.environ.get(MODEL, "")
    max_len = _longest(Path(model)) if model else TINY_LEN
    flags = translate(arguments, DIALECTS[dialect], max_len, scripted=SCRIPTED in os.environ)
    files = [str(it) for it in sorted(Path(model).glob("*.gguf"))] if model else []
    serve = [sys.executable, "-m", "pagoda", "serve", *(files or [model] if model else [])]
    return [*serve, *flags, "--log-level", "info"]


def _longest(model: Path) -> int:
    """The context that tests get from a model."""
    config = model / "config.json"
    if not config.is_file():
        return LARGEST_LEN
    own = json.loads(config.read_text(encoding="utf-8")).get("max_position_embeddings", LARGEST_LEN)
    return min(LARGEST_LEN, int(own))


def follow_script(flags: Sequence[str]) -> None:
    """Lets the workers of a server that this process becomes read `script`."""
    import pagoda.checkpoints

    script = str(Path(__file__).with_name("script"))
    tiny = Path(pagoda.checkpoints.__file__).parent / "pagoda_tiny"
    directory = Path(os.environ.get(MODEL) or tiny)
    os.environ["PYTHONPATH"] = f"{script}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    os.environ["PAGODA_PEERS_TOKENIZER"] = str(directory / "tokenizer.json")
    if "--tool-call-parser" in flags:
        parser = flags[flags.index("--tool-call-parser") + 1]
        os.environ["PAGODA_PEERS_FORMAT"] = parser


def main() -> None:
    logs = Path(os.environ[LOGS])
    try:
        argv = command(sys.argv[1], sys.argv[2:])
    except NotApplicableError as reason:
        (logs / f"not_applicable.{os.getpid()}").write_text(str(reason), encoding="utf-8")
        sys.exit(NOT_APPLICABLE)
    log = os.open(logs / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stderr.fileno())
    if SCRIPTED in os.environ:
        follow_script(argv)
    os.execv(sys.executable, argv)


if __name__ == "__main__":
    main()
