# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from tools.audit import main

PROGRAM = """#!{python}
import json, sys
words = sys.argv[1:]
service = words[words.index("--vulnerability-service") + 1]
if "--requirement" in words:
    if service == {silent!r} or {silent!r} == "all":
        print(json.dumps({{"dependencies": [{{"name": "requests", "skip_reason": "not found"}}]}}))
        sys.exit(0)
    print(json.dumps({{"dependencies": [{{"name": "requests", "vulns": [{{"id": "CVE-2018-18074"}}]}}]}}))
    sys.exit(1)
print("audited with", service, *words[words.index("--skip-editable") :])
sys.exit({status})
"""


def program(directory: Path, silent: str, status: int) -> list[str]:
    """A pip-audit one of whose services, or all, know nothing."""
    path = directory / "pip-audit"
    path.write_text(PROGRAM.format(python=sys.executable, silent=silent, status=status))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return [str(path)]


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize(("silent", "service"), [("", "osv"), ("osv", "pypi")])
def test_the_first_service_that_knows_something_is_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], silent: str, service: str, status: int
) -> None:
    assert main(["a", "b"], program(tmp_path, silent, status)) == status
    assert capfd.readouterr().out == f"audited with {service} --skip-editable --path a --path b\n"


def test_services_that_find_nothing_anywhere_are_no_good_news(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["a"], program(tmp_path, "all", 0)) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "Vulnerabilities cannot be looked up from here: neither OSV nor PyPI answers.\n"
    )
