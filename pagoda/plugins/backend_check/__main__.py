# SPDX-License-Identifier: Apache-2.0
"""`python -m pagoda.plugins.backend_check NAME`: what `pagoda backend check` runs, in a process that may load
torch."""

from __future__ import annotations

import sys
from collections import Counter

from pagoda.devices import BackendUnavailableError
from pagoda.errors import PagodaError
from pagoda.plugins.backend_check.suite import open_subject, outcomes


def main() -> int:
    """Prints a line for each check; the status is 1 if one failed, 2 if there is no such backend."""
    (name,) = sys.argv[1:]
    try:
        subject = open_subject(name)
    except BackendUnavailableError as error:
        print(f"pagoda: the {name} backend is not available here: {error}.", file=sys.stderr)
        return 2
    except PagodaError as error:
        print(f"pagoda: {error}", file=sys.stderr)
        return 2
    counts: Counter[str] = Counter()
    for outcome in outcomes(subject):
        counts[outcome.verdict] += 1
        print(outcome, flush=True)
    print(
        f"{name}: {counts['ok']} checks passed, {counts['lacks']} of what it says it lacks, "
        f"{counts['FAILED']} failed"
    )
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
