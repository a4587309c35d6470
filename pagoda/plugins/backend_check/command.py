# SPDX-License-Identifier: Apache-2.0
"""`pagoda backend`: checks of backends."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

from cyclopts import Parameter

from pagoda.cli.options import GeneralOptions
from pagoda.devices import AUTO
from pagoda.errors import ConfigError

Name = Annotated[str, Parameter(name="NAME")]


def check(name: Name, /, *, general: GeneralOptions = GeneralOptions()) -> int:
    """Check that a backend computes what it should: every operation, format and layout, against reference.

    Args:
        name: A backend, as serve --backend takes it.

    Raises ConfigError: the name is that of no single backend.
    """
    general.apply()
    if name == AUTO:
        raise ConfigError("NAME must be one backend, such as cpu, not auto.")
    # It loads torch, which the command line never does.
    command = [sys.executable, "-m", "pagoda.plugins.backend_check", name]
    return subprocess.run(command, check=False).returncode
