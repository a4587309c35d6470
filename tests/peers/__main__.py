# SPDX-License-Identifier: Apache-2.0
"""Runs the HTTP tests of another server against Pagoda, and prints what became of them.

    python -m tests.peers vllm PATH [--output FILE.json] [--only PART] [--limit SECONDS] [--model DIR] [--scripted]

PATH is a checkout of vLLM, of SGLang, or of llama.cpp (or llama-cpp-python, which holds one). What its tests need
must be installed: tests/peers/requirements.txt. Some tests, those of tools above all, are made for models of
billions of parameters; with --scripted the model says what those would (tests/peers/script).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.peers.suites import SUITES, Suite

VERDICTS = ("pass", "vacuous", "fail", "n/a", "skip")
_LONG = 8192
_HERE = Path(__file__).parent
_PAGODA = _HERE.parent.parent


def files_of(suite: Suite, path: Path) -> tuple[Path, list[Path]]:
    """The root of a suite and its files. Raises SystemExit: there is none at the path."""
    for below in suite.root:
        root = path / below
        found = sorted({file for pattern in suite.files for file in root.glob(pattern)})
        kept = [it for it in found if not any(part in it.name for part in suite.left_out)]
        if kept:
            return root, kept
    raise SystemExit(f"{path} holds none of the tests that are looked for.")


def run(
    name: str, path: Path, options: list[str], only: str, limit_s: float
) -> Iterator[dict[str, str]]:
    """Runs a suite, a pytest for each file; yields one verdict for each test, in their order.

    A test that takes more than `limit_s` seconds fails. Files without `only` in their paths are left out.
    """
    suite = SUITES[name]
    root, files = files_of(suite, path)
    for file in files:
        if only in str(file.relative_to(root)):
            yield from _run_file(suite, root, file, [f"--timeout={limit_s}", *options])


def _run_file(suite: Suite, root: Path, file: Path, options: list[str]) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as directory:
        logs, results = Path(directory) / "logs", Path(directory) / "results"
        logs.mkdir()
        results.touch()
        environment = {
            **os.environ,
            "PYTHONPATH": f"{_HERE}{os.pathsep}{_PAGODA}",
            "PAGODA_PEERS_LOGS": str(logs),
            "PAGODA_PEERS_RESULTS": str(results),
            "PAGODA_PEERS_SUITE": str(root),
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-m", "pytest", "--rootdir", str(root), "-q", "--tb=line"]
        command += ["-p", "plugin", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
        command += [part for plugin in suite.plugins for part in ("-p", plugin)]
        command += ["-m", suite.markers] if suite.markers else []
        command += ["--continue-on-collection-errors", *options, str(file)]
        try:
            subprocess.run(command, cwd=root, env=environment, check=False)
        finally:
            yield from map(json.loads, results.read_text(encoding="utf-8").splitlines())


def tables(verdicts: list[dict[str, str]]) -> str:
    """Tables in Markdown: counts by file, and failures by reason."""
    by_file: dict[str, Counter[str]] = {}
    for line in verdicts:
        by_file.setdefault(line["test"].partition("::")[0], Counter())[line["verdict"]] += 1
    total = sum(by_file.values(), Counter[str]())
    rows = [f"| file | {' | '.join(VERDICTS)} |", "|---|" + "---|" * len(VERDICTS)]
    for file, counts in [*by_file.items(), ("all", total)]:
        rows.append(f"| {file} | {' | '.join(str(counts[verdict]) for verdict in VERDICTS)} |")
    reasons = Counter(line["reason"] for line in verdicts if line["verdict"] == "fail")
    rows += ["", "| failures | reason |", "|---|---|"]
    rows += [f"| {count} | {reason.replace('|', '/')} |" for reason, count in reasons.most_common()]
    return "\n".join(rows)


def stretch_tiny(directory: Path) -> None:
    """Copies the embedded model with a longer context than it was trained for, for prompts of large models."""
    tiny = _PAGODA / "pagoda" / "checkpoints" / "pagoda_tiny"
    shutil.copytree(tiny, directory, dirs_exist_ok=True)
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["max_position_embeddings"] = _LONG
    file.write_text(json.dumps(config), encoding="utf-8")


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--output", type=Path, help="a file for all verdicts, as JSON")
    parser.add_argument("--only", default="", help="a part of the paths of the files to run")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a test may take")
    parser.add_argument("--model", default="", help="a model's directory, if not the embedded one")
    parser.add_argument(
        "--scripted",
        action="store_true",
        help="the model says what is written in tests/peers/script",
    )
    arguments, options = parser.parse_known_args()
    if arguments.scripted:
        os.environ["PAGODA_PEERS_SCRIPTED"] = "1"
    signal.signal(signal.SIGTERM, _stop)
    verdicts: list[dict[str, str]] = []
    suite, path = arguments.suite, arguments.path.resolve()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(arguments.model or directory)
        if arguments.scripted and not arguments.model:
            stretch_tiny(model)
        if arguments.scripted or arguments.model:
            os.environ["PAGODA_PEERS_MODEL"] = str(model.resolve())
        try:
            verdicts.extend(run(suite, path, options, arguments.only, arguments.limit))
        except KeyboardInterrupt:
            print("Stopped; what ran until now:")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(verdicts, indent=1), encoding="utf-8")
    print(tables(verdicts))


if __name__ == "__main__":
    main()
