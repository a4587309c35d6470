# SPDX-License-Identifier: Apache-2.0
"""`python -m pagoda` is the command `pagoda`."""

from __future__ import annotations

from pagoda.cli.start import main

if __name__ == "__main__":
    raise SystemExit(main())
