# SPDX-License-Identifier: Apache-2.0
"""Nothing that can run code of others is in the source: no unpickling, and no code of models."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for room in ("pagoda", "benchmarks", "tools") for path in (ROOT / room).rglob("*.py")
)
MODULES = frozenset(
    (
        "pickle",
        "cPickle",
        "_pickle",
        "marshal",
        "shelve",
        "dill",
        "cloudpickle",
        "joblib",
        "jsonpickle",
    )
)
"""Modules that make objects, and so run code, of bytes."""
CALLS = frozenset(("eval", "exec", "compile", "__import__", "execfile"))
TRUSTING = {"allow_pickle": False, "weights_only": True, "trust_remote_code": False, "shell": False}
"""Arguments that must have one value where they are given."""
NEEDED = {"torch.load": "weights_only"}
"""Calls that are safe only with an argument."""
FORBIDDEN = frozenset(
    ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "yaml.unsafe_load_all")
) | frozenset(
    ("os.system", "os.popen", "torch.hub.load", "numpy.fromregex", "recv_pyobj", "send_pyobj")
)


def faults(text: str) -> Iterator[str]:
    """What a source has that could run code of others, by line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
            for name in names:
                if set(name.split(".")) & MODULES:
                    yield f"{node.lineno}: imports {name}"
        if isinstance(node, ast.Attribute) and node.attr in MODULES:
            yield f"{node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN:
            yield f"{node.lineno}: {ast.unparse(node)}"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func).replace("np.", "numpy.")
        if called in CALLS | FORBIDDEN:
            yield f"{node.lineno}: calls {called}"
        given = {word.arg: word.value for word in node.keywords}
        for name, value in TRUSTING.items():
            found = given.get(name)
            if found is not None and not (isinstance(found, ast.Constant) and found.value is value):
                yield f"{node.lineno}: {name} is {ast.unparse(found)}"
        needed = NEEDED.get(called)
        if needed is not None and needed not in given:
            yield f"{node.lineno}: {called} without {needed}"


def test_no_source_runs_code_of_others() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{fault}"
        for path in SOURCES
        for fault in faults(path.read_text())
    ]
    assert len(SOURCES) > 400
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        *(
            "import pickle",
            "from pickle import loads",
            "import multiprocessing.pickle",
            "x.pickle.loads(y)",
        ),
        *("torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f, allow_pickle=True)"),
        *("np.load(f, allow_pickle=x)", "yaml.load(f)", "yaml.full_load(f)", "socket.recv_pyobj()"),
        *(
            "eval(x)",
            "exec(x)",
            "subprocess.run(x, shell=True)",
            "T.from_pretrained(x, trust_remote_code=True)",
        ),
        *("import marshal", "os.system(x)", "import joblib", "__import__(x)"),
    ],
)
def test_what_is_found(text: str) -> None:
    assert list(faults(text))


@pytest.mark.parametrize(
    "text",
    [
        "torch.load(f, weights_only=True)",
        "np.load(f)",
        "yaml.safe_load(f)",
        "model.eval()",
        "re.compile(x)",
    ],
)
def test_what_is_fine(text: str) -> None:
    assert not list(faults(text))
