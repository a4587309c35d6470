# SPDX-License-Identifier: Apache-2.0
"""The known name that is nearest to another one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping


def nearest(name: str, known: Mapping[str, str]) -> str:
    """The end of a sentence that names the nearest of `known`, which has what is said by what is compared.

    Empty where none is near.
    """
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.62)
    return f"; the nearest that is supported is {known[near[0]]}" if near else ""
