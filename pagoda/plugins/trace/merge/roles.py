# SPDX-License-Identifier: Apache-2.0
"""Names and order of processes: every server's frontend, its engines, their workers.

Process ids do not tell processes apart, since systems use them again. A role that several processes had, one after
the other, has a group of rows for each: `worker dp0 tp0 pp0`, `worker dp0 tp0 pp0 #2`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from pagoda.plugins.trace.merge.model import Process
from pagoda.telemetry.fragments import ProcessHeader

_PLACE = re.compile(r"(engine|worker) dp(\d+)(?: tp(\d+) pp(\d+))?")
_LEVELS = {"router": 0, "frontend": 1, "engine": 2, "worker": 3}
_OTHER = 4
_LAST = 1 << 31

Group = tuple[str, ...]
"""The processes of one server: by the `uid` of its frontend, else by host and run."""


def in_order(headers: Sequence[ProcessHeader]) -> list[Process]:
    """The processes as they are to be shown, numbered from 1, each under a name that no other has."""
    groups = _groups(headers)
    members: defaultdict[Group, list[ProcessHeader]] = defaultdict(list)
    for header in headers:
        members[groups[header.uid]].append(header)
    ordered = sorted(members, key=lambda group: _group_order(members[group]))
    labels = _labels(ordered, members)
    found: dict[str, Process] = {}
    for group in ordered:
        times: Counter[str] = Counter()
        for header in sorted(members[group], key=_order):
            times[header.role] += 1
            again = f" #{times[header.role]}" if times[header.role] > 1 else ""
            name = f"{header.role}{labels[group]}{again}"
            found[header.uid] = Process(len(found) + 1, name, header)
    for process in found.values():
        parent = found.get(process.header.parent_uid)
        process.parent = None if parent is None else parent.pid
    return list(found.values())


def _level(header: ProcessHeader) -> int:
    return _LEVELS.get(header.kind, _OTHER)


def _order(header: ProcessHeader) -> tuple[int, int, int, int, str, int, str]:
    """The order within a server: the frontend, then each engine with its workers, first come first."""
    place = _PLACE.fullmatch(header.role)
    if place is None:
        replica = -1 if _level(header) < _OTHER else _LAST
        return (replica, _level(header), 0, 0, header.role, header.wall_ns, header.uid)
    dp, tp, pp = (int(number or 0) for number in place.groups()[1:])
    return (dp, _level(header), pp, tp, header.role, header.wall_ns, header.uid)


def _groups(headers: Sequence[ProcessHeader]) -> dict[str, Group]:
    by_uid = {header.uid: header for header in headers}
    heads = [header for header in headers if _level(header) <= _LEVELS["frontend"]]
    result: dict[str, Group] = {}
    for header in headers:
        above: ProcessHeader | None = header
        while above is not None and above not in heads:
            parent = by_uid.get(above.parent_uid)
            above = parent if parent and _level(parent) < _level(above) else None
        result[header.uid] = _group_by_place(header, heads) if above is None else (above.uid,)
    return result


def _group_by_place(header: ProcessHeader, heads: Sequence[ProcessHeader]) -> Group:
    """The one server of the run, on the host if need be, for a process whose parents left no fragment."""
    same_run = [head for head in heads if head.run == header.run]
    same_host = [head for head in same_run if head.host == header.host]
    for candidates in (same_host, same_run):
        if len(candidates) == 1:
            return (candidates[0].uid,)
    return (header.host, header.run)


def _group_order(members: Sequence[ProcessHeader]) -> tuple[int, int, str]:
    first = min(members, key=_order)
    return (_level(first), first.wall_ns, first.uid)


def _labels(
    groups: Sequence[Group], members: Mapping[Group, Sequence[ProcessHeader]]
) -> dict[Group, str]:
    """Suffixes that tell servers apart: nothing for a single one, else the host, or the run, or a number."""
    first = {group: min(members[group], key=_order) for group in groups}
    servers = [group for group in groups if _level(first[group]) != _LEVELS["router"]]
    routers = [group for group in groups if group not in servers]
    labels: dict[Group, str] = {}
    for kind in (routers, servers):
        if len(kind) == 1:
            labels[kind[0]] = ""
            continue
        hosts = Counter(first[group].host for group in kind)
        runs = Counter(first[group].run for group in kind)
        for number, group in enumerate(kind, start=1):
            header = first[group]
            if hosts[header.host] == 1:
                label = header.host
            elif runs[header.run] == 1:
                label = header.run
            else:
                label = f"{header.host} {number}"
            labels[group] = f" @ {label}"
    return labels
