# SPDX-License-Identifier: Apache-2.0
"""Asks a database of known vulnerabilities about the packages that Pagoda is installed with.

    make audit

pip-audit asks OSV (https://osv.dev) or, where that cannot be reached, PyPI. A service that cannot be reached, or
a package index that only looks like PyPI, may let pip-audit find nothing and be content; so each service is asked
first about a package that is known to be vulnerable. The exit status is 0 if nothing is known of any package, 1 if
something is, and 2 if no service can be asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SERVICES = ("osv", "pypi")
CANARY = "requests==2.19.0"
"""CVE-2018-18074."""
_TIMEOUT_S = 15
_EXIT_UNKNOWN = 2


def main(
    packages: Sequence[str], command: Sequence[str] = (sys.executable, "-m", "pip_audit")
) -> int:
    """Audits the directories `packages` with the program `command`. Returns the exit status."""
    for service in SERVICES:
        asking = [*command, "--timeout", str(_TIMEOUT_S), "--vulnerability-service", service]
        if knows_canary(asking):
            paths = [word for path in packages for word in ("--path", path)]
            return subprocess.run([*asking, "--skip-editable", *paths], check=False).returncode
    print(
        "Vulnerabilities cannot be looked up from here: neither OSV nor PyPI answers.",
        file=sys.stderr,
    )
    return _EXIT_UNKNOWN


def knows_canary(asking: Sequence[str]) -> bool:
    """True if the service reports the package that is known to be vulnerable."""
    with tempfile.TemporaryDirectory() as directory:
        listed = Path(directory) / "requirements.txt"
        listed.write_text(CANARY + "\n")
        words = ("--requirement", str(listed), "--no-deps", "--disable-pip", "--format", "json")
        done = subprocess.run([*asking, *words], check=False, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)["dependencies"]
        return any(package.get("vulns") for package in found)
    except (ValueError, KeyError):
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
