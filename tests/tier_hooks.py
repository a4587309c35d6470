# SPDX-License-Identifier: Apache-2.0
"""Hooks of pytest for tiers: which of the collected cases run, in which process and order, and what they took."""

from __future__ import annotations

from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from case_tiers import (
    OF_OTHER_KERNELS,
    ROTATED,
    TIERS,
    UNMEASURED,
    WITHOUT_TORCH,
    Case,
    Change,
    choose,
    find_change,
    folder_of,
    key,
    pin,
    read_durations,
    read_pinned,
    room_of,
    write_durations,
)
from kept_answers import ANSWERS

CHANGE = pytest.StashKey[Change]()
CASES = pytest.StashKey[list[Case]]()
"""All cases that were collected, chosen or not."""
SUMMARY = pytest.StashKey[str]()
NAMED = "case"
"""Property of reports: the node id of a case, to which xdist adds a group."""

SHORT_ROOMS = (
    "anthropic",
    "api",
    "backend",
    "batches",
    "checkpoints",
    "concurrency",
    "fleet",
    "ipc",
    "kv",
    "llamacpp",
    "llm",
    "messages",
    "model",
    "ollama",
    "page",
    "responses",
    "scoring",
    "sglang",
    "telemetry",
    "text",
    "tools",
    "vllm",
)
"""Rooms of short tests. Workers of xdist take a file of these at a time, and tests of other rooms one by one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=TIERS,
        default="all",
        help="run the cases of this tier only: see CONTRIBUTING.md (all)",
    )
    parser.addoption(
        "--update-durations",
        action="store_true",
        help="keep what the cases took in tests/durations.json",
    )
    parser.addoption(
        "--update-answers",
        action="store_true",
        help="ask transformers anew, and keep what it answers in tests/answers.json",
    )
    parser.addoption(
        "--pin-failures",
        action="store_true",
        help="add the cases that fail to tests/pinned.txt, whose cases run in every tier",
    )


def pytest_configure(config: pytest.Config) -> None:
    ANSWERS.anew = config.getoption("update_answers")
    told = getattr(config, "workerinput", {}).get("change")
    config.stash[CHANGE] = Change(told[0], frozenset(told[1])) if told else find_change()
    if told is None:
        config.pluginmanager.register(_Records(config))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes choose for the same change."""
    commit, files = node.config.stash[CHANGE]
    node.workerinput["change"] = (commit, sorted(files))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Rooms that load torch are not even read for `make quick`, unless the change touches them."""
    if config.getoption("tier") != "quick":
        return None
    room = room_of(collection_path.relative_to(config.rootpath))
    if room is None:
        return None
    return room not in WITHOUT_TORCH | config.stash[CHANGE].rooms() or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the cases of the tier; those that share a fixture stay together, and what takes longest is first."""
    durations, change, tier = read_durations(), config.stash[CHANGE], config.getoption("tier")
    numbers: dict[int, int] = {}
    cases = config.stash[CASES] = [_case(item, numbers) for item in items]
    rotated = OF_OTHER_KERNELS if config.getoption("kernels") else ROTATED
    chosen = choose(cases, tier, change, durations, read_pinned(), rotated)

    def seconds(of: list[pytest.Item]) -> float:
        return sum(durations.get(key(item.nodeid), UNMEASURED) for item in of)

    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    left_out = []
    for item in items:
        item.user_properties.append((NAMED, item.nodeid))
        if item.nodeid not in chosen:
            left_out.append(item)
            continue
        group = _group(item)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
        groups[group or item.nodeid].append(item)
    ordered = list(groups.values())
    if hasattr(config, "workerinput"):
        ordered.sort(key=seconds, reverse=True)
    config.stash[SUMMARY] = (
        f"tier {tier} of commit {change.commit[:8] or 'none'} and {len(change.files)} changed files: "
        f"{len(chosen)} of {len(items)} cases, expected to take one process "
        f"{sum(map(seconds, ordered)):.0f} s"
    )
    items[:] = [item for group in ordered for item in group]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def _case(item: pytest.Item, numbers: dict[int, int]) -> Case:
    """The case of `item`; `numbers` counts values that are neither text nor numbers, by their identity."""

    def name(value: object) -> object:
        if value is None or isinstance(value, str | int | float):
            return value
        return f"#{numbers.setdefault(id(value), len(numbers))}"

    callspec = getattr(item, "callspec", None)
    values = {key: name(value) for key, value in callspec.params.items()} if callspec else {}
    axes: dict[str, tuple[object, ...]] = {}
    for mark in item.iter_markers("parametrize"):
        table = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = table.replace(" ", "").split(",") if isinstance(table, str) else list(table)
        if all(it in values for it in names):
            axes[",".join(names)] = tuple(values.pop(it) for it in names)
    return Case(item.nodeid, axes | {key: (value,) for key, value in values.items()})


def _group(item: pytest.Item) -> str | None:
    file = item.nodeid.split("::")[0]
    if folder_of(item.path) in SHORT_ROOMS:
        return file
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return None
    module_scoped = [
        name
        for name, definitions in info.name2fixturedefs.items()
        if name != "backend" and definitions[-1].scope in ("module", "class", "package")
    ]
    if not module_scoped:
        return None
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return " ".join(
        [
            file,
            *(str(parameters[name]) for name in (*module_scoped, "backend") if name in parameters),
        ]
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of xdist tells its controller."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["summary"] = session.config.stash.get(SUMMARY, "")
        output["answers"] = ANSWERS.added


class _Records:
    """What a run says in the end, and what it leaves in the repository."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: set[str] = set()
        self._answers: dict[str, list[int]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = dict(report.user_properties).get(NAMED)
        if not isinstance(name, str):  # a process that ended during the case tells nothing of it
            return
        self._seconds[name] += report.duration
        if report.failed:
            self._failed.add(name)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})
        if "summary" in output:  # a process that broke off has none
            self._config.stash[SUMMARY] = output["summary"]
        self._answers |= output.get("answers", {})

    def pytest_sessionfinish(self) -> None:
        if self._config.getoption("update_durations"):
            took = {
                key(it): seconds for it, seconds in self._seconds.items() if it not in self._failed
            }
            write_durations(read_durations() | took)
        if self._config.getoption("pin_failures"):
            pin(self._failed)
        answers = self._answers | ANSWERS.added
        if answers:
            ANSWERS.keep(version("transformers"), answers)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(self._config.stash.get(SUMMARY, ""))
