# SPDX-License-Identifier: Apache-2.0
"""Writes the table of docs/metrics.md from the metrics that there are: `make docs`."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
from prometheus_client.core import Metric

from pagoda.api.monitoring.exposition import families
from pagoda.api.monitoring.metrics import Snapshot
from pagoda.api.monitoring.request_metrics import Refusal, RequestMetrics
from pagoda.messages.frontend import EngineReady
from pagoda.messages.load import LoadReport, ProcessMemory, ReplicaLoad, TierLoad

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
_ROW = "| `pagoda_"


def snapshot_of_everything() -> Snapshot:
    """A snapshot in which every metric has a series."""
    report = LoadReport(
        tiers=(TierLoad(name="host", num_total_blocks=1),),
        expert_tokens=[1],
        expert_rank_tokens=[1],
        accepted_per_position=[1],
    )
    replica = ReplicaLoad(name="0", state="ready", num_requests=0, weighed_tokens=0, report=report)
    requests = RequestMetrics()
    requests.refusals[Refusal("", 400, "")] += 1
    return Snapshot(
        "model",
        requests,
        0.0,
        (ProcessMemory("frontend", 1, 2),),
        msgspec.structs.replace(report, replicas=(replica,)),
        EngineReady(
            max_model_len=1,
            vocab_size=1,
            num_blocks=1,
            block_size=1,
            max_num_seqs=1,
            max_num_waiting=1,
            max_num_waiting_tokens=2**30,
            summary="",
        ),
        adapters=("adapter",),
        max_adapters=1,
    )


def name_of(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def labels_of(metric: Metric) -> str:
    return ", ".join(f"`{label}`" for label in metric._labelnames)  # type: ignore[attr-defined]


def page() -> str:
    """The text of docs/metrics.md with a row for each metric."""
    rows = [
        f"| `{name_of(metric)}` | {metric.type} | {labels_of(metric)} | {metric.documentation} |"
        for metric in families(snapshot_of_everything())
    ]
    groups = itertools.groupby(
        PAGE.read_text(encoding="utf-8").splitlines(), lambda line: line.startswith(_ROW)
    )
    lines = itertools.chain.from_iterable(rows if is_row else group for is_row, group in groups)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
