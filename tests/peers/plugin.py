# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin that runs inside another server's test suite, judges each test and writes a line about it.

A test passes only for a reason. One that passes although Pagoda refused its request as unknown, or lacks its
route, shows nothing of Pagoda, and so does one that asks Pagoda nothing: both are `vacuous`. Tests of the other
server's own code, and of what is no part of Pagoda, are `n/a`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import requests

LOGS = "PAGODA_PEERS_LOGS"
RESULTS = "PAGODA_PEERS_RESULTS"
_LINE = re.compile(
    r"(?P<method>[A-Z]+) (?P<path>/\S*) (?P<status>\d{3}) [\d.]+ s"
    r"(?:, code (?P<code>[\w-]+))?(?:, param (?P<param>[^,\n]+))?"
)
_ANSWER = re.compile(r"\d+ prompt tokens \(")
ABSENT = ("not_supported", "unknown_field", "not_found")
_MISSING = re.compile(r"fixture '\w+' not found")
_QUIET = ("/health", "/metrics")


class Request(NamedTuple):
    """A line of the server's log."""

    method: str
    path: str
    status: int
    code: str
    param: str

    @property
    def is_absent(self) -> bool:
        """True if Pagoda has no such route, or does not know the field."""
        no_route = self.status in (404, 405) and self.code in ("", "not_found", "None")
        return no_route or self.code in ABSENT


class Judge:
    """Reads the logs of all servers, and judges tests by them."""

    def __init__(self, logs: Path, results: Path) -> None:
        self._logs = logs
        self._results = results
        self._read: dict[Path, int] = {}
        self._phases: dict[str, list[Any]] = {}
        self._asking: set[str] = set()
        """Files whose tests have started a server."""
        self._num_sent = 0
        """Requests that the running test has made itself."""

    def news(self) -> tuple[list[Request], int, list[str]]:
        """Refusals and other logged requests since the last call, the number of answers, and what was not
        applicable."""
        requests, num_answers, reasons = [], 0, []
        for path in sorted(self._logs.iterdir()):
            text = path.read_text(encoding="utf-8", errors="replace")
            new = text[self._read.get(path, 0) :]
            self._read[path] = len(text)
            if path.name.startswith("not_applicable"):
                reasons += [new] if new else []
                continue
            for line in new.splitlines():
                found = _LINE.search(line)
                if found is not None:
                    requests.append(
                        Request(
                            found["method"],
                            found["path"],
                            int(found["status"]),
                            found["code"] or "",
                            found["param"] or "",
                        )
                    )
                elif _ANSWER.search(line):
                    num_answers += 1
        return requests, num_answers, reasons

    def counted(self, send: Callable[..., Any]) -> Callable[..., Any]:
        """A function of an HTTP client that also counts its calls."""

        def sends(*args: Any, **kwargs: Any) -> Any:
            self._num_sent += 1
            return send(*args, **kwargs)

        return sends

    def collect(self, report: Any) -> None:
        """Notes a phase of a test."""
        self._phases.setdefault(report.nodeid, []).append(report)

    def judge(self, nodeid: str) -> None:
        """Writes the verdict on a test whose phases are over."""
        phases = self._phases.pop(nodeid, [])
        num_logs = len(self._read)
        requests, num_answers, reasons = self.news()
        if len(self._read) > num_logs:
            self._asking.add(nodeid.partition("::")[0])
        requests = [it for it in requests if it.path not in _QUIET]
        refused = [it for it in requests if it.is_absent]
        failed = next((it for it in phases if it.failed), None)
        skipped = next((it for it in phases if it.skipped), None)
        error = _last_line(failed) if failed else ""
        if failed and reasons:
            verdict, reason = "n/a", reasons[-1]
        elif failed and _is_foreign(error, requests, num_answers, nodeid, self._asking):
            verdict, reason = "n/a", f"asks no server, or for what is not here: {error}"
        elif failed:
            verdict, reason = "fail", _reason(refused, requests, error)
        elif skipped:
            text = str(getattr(skipped, "wasxfail", "") or skipped.longrepr)
            is_ours = "part of the other server" in text
            verdict, reason = ("n/a" if is_ours else "skip"), text[-160:]
        else:
            others = [it for it in requests if not it.is_absent]
            has_asked = num_answers or others or (self._num_sent and not refused)
            is_vacuous = not has_asked or (refused and not num_answers)
            verdict = "vacuous" if is_vacuous else "pass"
            reason = _reason(refused, [], "asks Pagoda nothing") if is_vacuous else ""
        self._num_sent = 0
        line = {"test": nodeid, "verdict": verdict, "reason": reason, "error": error}
        with self._results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _is_foreign(
    error: str, requests: list[Request], num_answers: int, nodeid: str, asking: set[str]
) -> bool:
    """True if a failure is not about Pagoda: the other server's code was called, or an adapter is missing."""
    if nodeid.partition("::")[0] not in asking:
        return True
    if any(it.code == "model_not_found" for it in requests) and "lora" in error.lower():
        return True
    is_silent = not requests and not num_answers
    return is_silent and ("Mock object" in error or "fixture '" in error)


def _last_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    missing = _MISSING.search(text)
    text = missing[0] if missing else text
    return " ".join(text.split())[:300]


def _reason(refused: list[Request], requests: list[Request], error: str) -> str:
    """The refusal that a test met, or what it says itself."""
    for request in refused:
        if request.status in (404, 405):
            return f"no route {request.method} {request.path}"
        return f"{request.code}: {request.param} at {request.path}"
    for request in requests:
        if request.status >= 400 and request.code:
            return f"{request.status} {request.code}: {request.param} at {request.path}; {error}"
    return error


def pytest_configure(config: pytest.Config) -> None:
    logs = Path(os.environ[LOGS])
    config.pluginmanager.register(_Reports(Judge(logs, Path(os.environ[RESULTS]))))


class _Reports:
    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Counts what the test itself asks, as the server does not log routes such as /health."""
        with pytest.MonkeyPatch.context() as patch:
            for kind in (requests.Session, httpx.Client, httpx.AsyncClient):
                patch.setattr(kind, "send", self._judge.counted(kind.send))
            yield

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._judge.collect(report)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._judge.judge(nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_collectreport(self, report: Any) -> Iterator[None]:
        yield
        if report.failed:
            self._judge.collect(report)
            self._judge.judge(report.nodeid)
