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
"""The variable with the directory of the model that serves; without it the embedded one does."""
NOT_APPLICABLE = 77
DIALECTS = {"vllm": VLLM, "llamacpp": LLAMA_CPP, "sglang": SGLANG}


def command(dialect: str, arguments: Sequence[str]) -> list[str]:
    """The command of Pagoda's server. Raises NotApplicableError: as `translate`."""
    model = os.environ.get(MODEL, "")
    flags = translate(arguments, DIALECTS[dialect], _longest(Path(model)) if model else TINY_LEN)
    serve = [sys.executable, "-m", "pagoda", "serve", *([model] if model else [])]
    return [*serve, *flags, "--log-level", "info"]


def _longest(model: Path) -> int:
    """The context that tests get from a model."""
    config = model / "config.json"
    if not config.is_file():
        return LARGEST_LEN
    own = json.loads(config.read_text(encoding="utf-8"))["max_position_embeddings"]
    return min(LARGEST_LEN, int(own))


def main() -> None:
    logs = Path(os.environ[LOGS])
    try:
        argv = command(sys.argv[1], sys.argv[2:])
    except NotApplicableError as reason:
        (logs / f"not_applicable.{os.getpid()}").write_text(str(reason), encoding="utf-8")
        sys.exit(NOT_APPLICABLE)
    log = os.open(logs / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stderr.fileno())
    os.execv(sys.executable, argv)


if __name__ == "__main__":
    main()
