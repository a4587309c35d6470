# SPDX-License-Identifier: Apache-2.0
"""Refuses docstrings that begin with a word which leaves out what they are about.

    python tools/check_docstrings.py [FILE OR DIRECTORY ...]

A docstring names its subject first: "Free blocks of the pool.", "Returns the replica with the least load.",
"Seconds until the lease ends." The check reads docstrings of modules, classes and functions, and strings that
stand after a field or a constant. It prints `file:line: "first words": why` for each that is refused, and exits
with 1 if there are any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("pagoda", "benchmarks", "tools")

# Each reason with the words that it holds for.
REASONS = {
    "a preposition: name the thing first (`Of a block` -> `Key of a block`)": (
        "above across after against along among around as at before behind below beneath beside besides between "
        "beyond by despite during except for from in inside into near of off on onto out outside over per since "
        "through throughout to toward towards under until up upon via with within without"
    ),
    "a pronoun: name what it stands for (`Those that wait` -> `Requests that wait`)": (
        "he him his it its itself she somebody someone such that their theirs them themselves these they those "
        "whatever whichever who whoever whom whose"
    ),
    "a question: name the answer (`How many blocks` -> `Number of blocks`, `Whether it is` -> `True if it is`)": (
        "how what when where whether which why"
    ),
    "a conjunction: begin a sentence of its own": (
        "also although and because but else however if nor once or otherwise so then though unless while yet"
    ),
    "a verb without its subject: say who or what": "are being done has having is may might must was were will",
    "a participle: say who does it (`Called at the end` -> `The engine calls this at the end`)": (
        "asked called given raised subtracted taken told"
    ),
}
REFUSED = {word: reason for reason, words in REASONS.items() for word in words.split()}


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each string that stands as a statement."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if not isinstance(statements, list):
                continue
            for statement in statements:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield statement.lineno, text


def offence(text: str) -> str | None:
    """Returns the first words of a docstring and why its first word is refused; None if it is fine."""
    words = text.split()
    if not words:
        return '"": an empty docstring: delete it'
    reason = REFUSED.get(words[0].strip("\"'(),.:;").lower())
    return None if reason is None else f'"{" ".join(words[:4])}": {reason}'


def check_file(path: Path) -> Iterator[str]:
    for line, text in sorted(docstrings(ast.parse(path.read_text(encoding="utf-8"), str(path)))):
        found = offence(text)
        if found is not None:
            yield f"{path}:{line}: {found}"


def main(arguments: Sequence[str]) -> int:
    paths = [Path(argument) for argument in arguments] or [ROOT / name for name in CHECKED]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        print(f"There is no {', '.join(missing)}.", file=sys.stderr)
        return 2
    files = [
        file
        for path in paths
        for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
        if "tests" not in file.relative_to(path).parts
    ]
    offences = [line for file in files for line in check_file(file)]
    print("\n".join(offences), end="\n" if offences else "")
    if offences:
        print(f"{len(offences)} docstrings do not begin with what they are about.", file=sys.stderr)
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
