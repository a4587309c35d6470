# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md, the dashboard and the rules name metrics that exist; Prometheus and Grafana accept them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from debian_programs import debian_program
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from pagoda.api.monitoring.exposition import aliases_of, families
from pagoda.api.monitoring.metrics import Snapshot
from tools.metrics_page import PAGE, labels_of, name_of, page, snapshot_of_everything

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "pagoda.json"
RULES = ROOT / "deploy" / "prometheus"


@pytest.fixture
def snapshot() -> Snapshot:
    return snapshot_of_everything()


def sample_names(snapshot: Snapshot) -> set[str]:
    return {sample.name for metric in families(snapshot) for sample in metric.samples}


def test_the_page_has_every_metric() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make docs writes the table"


def test_the_page_has_every_name_of_vllm(snapshot: Snapshot) -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    told = [line for line in lines if line.startswith("| `vllm:")]
    found = [f"| `{name_of(metric)}` | {labels_of(metric)} |" for metric in aliases_of(snapshot)]
    assert sorted(" | ".join(line.split(" | ")[:2]) + " |" for line in told) == sorted(found)


def test_help_texts_are_sentences(snapshot: Snapshot) -> None:
    for metric in (*families(snapshot), *aliases_of(snapshot)):
        assert metric.documentation.endswith(".")
        assert "|" not in metric.documentation


# ---- the dashboard


def dashboard() -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return whole


def expressions(whole: dict[str, Any]) -> Iterator[str]:
    for panel in whole["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in whole["templating"]["list"]:
        yield variable["query"]


def lost(given: Any, kept: Any, path: str) -> Iterator[str]:
    """Where `kept` is not all that was given."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            yield from lost(value, kept.get(name, "nothing"), f"{path}.{name}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (value, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(value, other, f"{path}[{index}]")
    elif given != kept:
        yield f"{path} is {given!r}, not {kept!r}"


def read_by_grafana(whole: dict[str, Any]) -> dict[str, Any]:
    """What is left of a dashboard in the types of Grafana's schema."""
    register_default_plugins()
    read: dict[str, Any] = json.loads(json.dumps(Dashboard.from_json(whole), cls=JSONEncoder))
    return read


def test_grafana_knows_all_that_the_dashboard_says() -> None:
    whole = dashboard()
    assert list(lost(whole, read_by_grafana(whole), "")) == []


def test_what_grafana_does_not_know_is_found() -> None:
    whole = dashboard()
    chart = next(panel for panel in whole["panels"] if panel["type"] == "timeseries")
    chart["options"]["legend"]["colour"] = "red"
    [problem] = lost(whole, read_by_grafana(whole), "")
    assert problem.endswith(".options.legend.colour is 'red', not 'nothing'")


def test_panels_lie_beside_each_other() -> None:
    panels = dashboard()["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells


def test_the_dashboard_asks_for_what_there_is(snapshot: Snapshot) -> None:
    names = sample_names(snapshot)
    asked = {name for text in expressions(dashboard()) for name in re.findall(r"pagoda_\w+", text)}
    assert asked <= names
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text(encoding="utf-8")))
    assert used - {"__rate_interval", "__all"} == variables


# ---- the rules


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / name).read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_rules_ask_for_what_there_is(snapshot: Snapshot) -> None:
    names = sample_names(snapshot)
    asked = {
        name
        for rule in (*rules("rules.yml"), *rules("alerts.yml"))
        for name in re.findall(r"pagoda_\w+", rule["expr"])
    }
    assert asked <= names


def test_every_alert_has_a_test() -> None:
    tests = yaml.safe_load((RULES / "tests.yml").read_text(encoding="utf-8"))["tests"]
    raised = {
        test["alertname"]
        for group in tests
        for test in group.get("alert_rule_test", ())
        if test.get("exp_alerts")
    }
    assert raised == {rule["alert"] for rule in rules("alerts.yml")}


@pytest.mark.parametrize(
    "command", [("check", "rules", "rules.yml", "alerts.yml"), ("test", "rules", "tests.yml")]
)
def test_prometheus_takes_the_rules(command: tuple[str, ...]) -> None:
    promtool = debian_program("promtool", package="prometheus")
    done = subprocess.run(
        [promtool, *command], cwd=RULES, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
