# SPDX-License-Identifier: Apache-2.0
"""Flags that the commands of `pagoda simulate` share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from pagoda.cli.options import Count
from pagoda.errors import ConfigError
from pagoda.plugins.simulate.records import Slo
from pagoda.plugins.simulate.simulation import DEFAULT_LEAP
from pagoda.plugins.simulate.workload import Workload, read_workload


@Parameter(name="*", group=Group("Workload", sort_key=10))
@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """The requests."""

    workload: Path
    """A trace (.jsonl, in Mooncake's format) or drawn sessions (.yaml)."""
    scale: Annotated[float, Parameter(validator=Number(gt=0, lte=1e6))] = 1.0
    """Users who come for each of the workload."""
    requests: Count | None = None
    """Take so many lines of a trace; by default all."""
    model: str = ""
    """Take only lines of a trace that name this model, as those of a router of several models do."""
    seed: int = 0
    """Seed of all that is drawn; the same seed gives the same bytes."""
    known_lengths: bool = False
    """Tell routers how long answers will be; by default they know max_tokens alone, as of most clients."""
    leap: Count = DEFAULT_LEAP
    """Steps that only decode are simulated so many at a time while nothing else happens; 1: each on its own."""
    slo: str = ""
    """Limits in ms of a good answer, such as ttft:500,tpot:60."""

    def read(self) -> Workload:
        """The workload anew: sessions can be read once. Raises ConfigError."""
        return read_workload(
            self.workload,
            self.seed,
            scale=self.scale,
            num_requests=self.requests,
            model=self.model,
        )

    def limits(self) -> Slo:
        """Raises ConfigError: --slo is not such a list."""
        limits = Slo()
        for part in filter(None, self.slo.split(",")):
            name, _, value = part.partition(":")
            try:
                seconds = float(value) / 1000
            except ValueError:
                seconds = -1.0
            if name not in ("ttft", "tpot") or not seconds > 0:
                raise ConfigError(f"--slo: {part!r} is no limit like ttft:500 or tpot:60.")
            setattr(limits, name, seconds)
        return limits

    def as_json(self) -> dict[str, object]:
        """The flags by name, as reports carry them."""
        return {**asdict(self), "workload": str(self.workload)}
