# SPDX-License-Identifier: Apache-2.0
"""What a text of `/metrics` says."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def series(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of each series of that name, in order."""
    return [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    ]


def value(text: str, name: str, **labels: str) -> float:
    """Of the one series that has these labels, whatever others it has."""
    [found] = [value for has, value in series(text, name) if labels.items() <= has.items()]
    return found


def names(text: str) -> set[str]:
    """Of all families, as their types are told."""
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
