# SPDX-License-Identifier: Apache-2.0
"""`pagoda simulate fit`: step times out of measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from pagoda.cli import output
from pagoda.cli.files import read_jsonl, write_json
from pagoda.errors import ConfigError
from pagoda.plugins.simulate.step_times import Slowdown, StepSample, fit
from pagoda.plugins.simulate.traced_steps import traced_samples

MIN_SAMPLES = 8
"""Fewer kinds of steps do not tell five costs apart."""
_TRACES = (".json", ".gz")
"""Ends of files of pagoda trace merge."""


def fit_steps(
    samples: Path,
    *,
    output_file: Annotated[Path | None, Parameter(name="--output")] = None,
) -> int:
    """Fit the time of a step to measured ones, print how far it is off, and write it for a topology's `steps`.

    Args:
        samples: A file of pagoda bench steps, or a trace of a server: a directory of fragments, or the file that
            pagoda trace merge made of them.
        output_file: Write the step times to this file.
    """
    read = _read(samples)
    num_alone = sum(it.replicas == 1 for it in read)
    if num_alone < MIN_SAMPLES:
        raise ConfigError(
            f"SAMPLES: {samples} has {num_alone} steps of one replica; a fit takes {MIN_SAMPLES} or more."
        )
    fitted = fit(read, samples.name)
    rows = [
        ("samples", f"{fitted.num_samples:,}"),
        ("step times", fitted.error()),
        *(
            (f"{process} {name}".strip(), f"{1e6 * value:,.3f} µs")
            for process, costs in (
                ("worker", fitted.costs()),
                ("engine", msgspec.structs.asdict(fitted.engine)),
                ("frontend", msgspec.structs.asdict(fitted.frontend)),
                ("", {"round_trip_s": fitted.round_trip_s}),
            )
            for name, value in costs.items()
            if value
        ),
    ]
    if fitted.spread:
        last = len(fitted.spread) - 1
        shown = (f"p{share} {fitted.spread[share * last // 100]:.2f}" for share in (5, 50, 95, 99))
        rows.append(("single steps", ", ".join(shown)))
    rows += [(f"at {it.load:g} threads a core", _slowdown(it)) for it in fitted.slowdowns[1:]]
    output.stdout().print(output.facts(rows))
    if output_file is not None:
        write_json(output_file, msgspec.structs.asdict(fitted))
    return 0


def _slowdown(one: Slowdown) -> str:
    processes = (("worker", one.worker), ("engine", one.engine), ("frontend", one.frontend))
    return ", ".join(
        f"{name} {slower.share:.2f} × + {1e6 * slower.more_s:.0f} µs" for name, slower in processes
    )


def _read(samples: Path) -> list[StepSample]:
    if samples.is_dir() or samples.suffix in _TRACES:
        return traced_samples(samples)
    return [sample for _, sample in read_jsonl(samples, StepSample, "SAMPLES")]
