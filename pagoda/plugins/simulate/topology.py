# SPDX-License-Identifier: Apache-2.0
"""Topologies in YAML: hosts and routers of which others consist, and faults."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from pagoda.cli.yaml_file import YamlFile
from pagoda.errors import ConfigError
from pagoda.fleet.policies import DEFAULT_POLICY, PolicyName
from pagoda.messages.worker_config import Role
from pagoda.plugins.plan.figures import Slo
from pagoda.plugins.router.prefill_decode import DEFAULT_MIN_TOKENS
from pagoda.plugins.simulate.step_times import (
    Blocks,
    Device,
    ModelShape,
    NotNegative,
    Positive,
    StepTimes,
    Whole,
    device_table,
    model_shape,
    read_step_times,
    roofline,
)

MAX_HOSTS = 100_000
MAX_LEVELS = 16
FLAG = "TOPOLOGY"


_USUAL_BLOCKS = 8192
"""Blocks of a KV cache of which nothing is known."""


class HostKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts that are alike; each is one engine over `devices` devices."""

    device: str = ""
    """Name of a device, of which the step times are a roofline."""
    devices: Whole = 1
    steps: str = ""
    """File of `pagoda simulate fit`, beside the topology, instead of a device."""
    role: Role = Role.NONE
    num_blocks: Blocks = 0
    """Blocks of the KV cache; 0: as many as have room."""
    block_size: Whole = 16
    host_blocks: Blocks = 0
    """Blocks of a KV tier in host memory."""
    max_num_seqs: Whole = 256
    max_num_batched_tokens: Whole = 2048
    max_num_waiting: Whole = 4096
    max_model_len: Whole = 131072
    start_s: NotNegative = 30.0
    """Seconds from a start to the first request."""
    price_per_hour: NotNegative | None = None
    """Price of a host; by default that of its devices."""
    round_trip_ms: NotNegative | None = None
    """Milliseconds to its router and back; by default as measured with the step times, or 0.2."""
    block_ms: NotNegative | None = None
    """Milliseconds to receive a block of KV from another host; by default as the device's link takes, or 1."""

    def blocks_with(self, steps: StepTimes) -> int:
        """Blocks of the KV cache: those given, else those of a fit, else a usual number."""
        fitted = steps.num_blocks * steps.block_size // self.block_size
        return self.num_blocks or fitted or _USUAL_BLOCKS


class RouterKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Routers that are alike, with hosts or further routers behind each."""

    children: Annotated[dict[str, Whole], msgspec.Meta(min_length=1)]
    """Numbers of hosts and routers behind each, by their kinds."""
    level: str = "pool"
    """A word for reports: pod, pool, cluster, region."""
    policy: PolicyName = DEFAULT_POLICY
    round_trip_ms: NotNegative = 1.0
    """Milliseconds to the router above it and back."""
    cores: Positive | None = None
    """Cores that the router and the hosts right behind it share: those of a machine with one server of several
    replicas; None: no process waits for another."""
    min_prefill_tokens: Whole = DEFAULT_MIN_TOKENS
    """Tokens from which on a prompt is computed by another host, where there are such hosts."""


class FaultRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults of all hosts or routers of a kind, at random or at a given time."""

    what: str
    """Kind of hosts or routers."""
    kind: Literal["fail", "cut", "router"] = "fail"
    """fail: hosts, and all that is behind a router, lose their power; cut: nothing passes between a router and
    that above it; router: a router's process ends, and its hosts go on."""
    every_s: Annotated[float, msgspec.Meta(ge=1, le=1e8)] | None = None
    """Mean seconds between two faults of one host or router (exponential)."""
    at_s: NotNegative | None = None
    """Instead: when the fault comes."""
    count: Whole = 1
    """Number of those hit at `at_s`, the first of their kind first."""
    group: Whole = 1
    """Neighbours that a fault takes at once: the hosts of a rack."""
    for_s: Positive = 60.0
    """Seconds until repair, of random faults on average (exponential)."""


class Timed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of hosts from an instant on."""

    at_s: NotNegative
    hosts: Whole


class ScalingRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts of routers that are started and stopped: as `pagoda plan` decides, or by a timetable. There are never
    more than the routers have children."""

    what: str
    """Kind of routers, each of which has hosts behind it."""
    least: Whole = 1
    """The fewest hosts of a router, all roles together."""
    begin: Whole | None = None
    """Hosts of a router at the begin; by default the fewest."""
    slo: Slo = Slo()
    interval_s: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 30.0
    """Seconds between decisions."""
    step_s: Positive | None = None
    """Seconds of a step without tokens that the planner reckons with, and `token_s` of each token; by default
    those of the line through a step of one token and a full one."""
    token_s: Positive | None = None
    lead_s: NotNegative | None = None
    """Seconds from when a host is asked for until it answers; by default the longest `start_s`."""
    hold_s: NotNegative = 300.0
    """Seconds for which fewer hosts must do before there are fewer."""
    timetable: tuple[Timed, ...] = ()
    """Numbers of hosts of each router over time, instead of a planner."""


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet as a file describes it, checked."""

    name: str
    root: str
    hosts: dict[str, HostKind]
    routers: dict[str, RouterKind]
    faults: tuple[FaultRule, ...]
    scaling: tuple[ScalingRule, ...]
    steps: dict[str, StepTimes]
    """Step times by kind of host."""
    prices: dict[str, float]
    """Prices an hour by kind of host."""
    block_s: dict[str, float]
    """Seconds to receive a block of KV from another host, by kind of host."""

    def latency_s(self, kind: str) -> float:
        """Seconds from a host's router to the host."""
        given = self.hosts[kind].round_trip_ms
        measured = self.steps[kind].round_trip_s or 0.0002
        return (measured if given is None else given / 1000) / 2

    def instances(self) -> Iterator[tuple[str, str]]:
        """Paths and kinds of all routers and hosts, each behind what is in front of it."""

        def below(path: str, kind: str) -> Iterator[tuple[str, str]]:
            yield path, kind
            router = self.routers.get(kind)
            for child, count in router.children.items() if router else ():
                for number in range(count):
                    suffix = f".{number}" if count > 1 else ""
                    yield from below(f"{path}/{child}{suffix}", child)

        return below(self.root, self.root)

    def errors(self) -> list[str]:
        """Words about the error of step times, of each kind of host."""
        return [f"{name}: {self.steps[name].error()}" for name in self.hosts]


_FIELDS = ("name", "model", "root", "hosts", "routers", "devices", "faults", "scaling")


def read_topology(path: Path) -> Topology:
    """Raises ConfigError, one sentence with the file and the line: it is not there or is no topology."""
    file = YamlFile(path, FLAG)
    for field in file.value:
        if field not in _FIELDS:
            raise file.error((str(field),), f"{field} is none of {', '.join(_FIELDS)}")
    hosts, routers = file.section("hosts", HostKind), file.section("routers", RouterKind)
    faults = file.convert(file.value.get("faults") or [], list[FaultRule], ("faults",))
    scaling = file.convert(file.value.get("scaling") or [], list[ScalingRule], ("scaling",))
    root = file.convert(file.value.get("root", ""), str, ("root",))
    if root not in routers:
        raise file.error(("root",), f"root is to name one of routers, not {root!r}")
    _check_children(file, hosts, routers)
    _check_cycles(file, routers)
    _check_all_are_used(file, root, hosts, routers)
    for index, rule in enumerate(faults):
        _check_fault(file, ("faults", index), rule, root, hosts, routers)
    for number in range(len(scaling)):
        _check_scaling(file, number, scaling, hosts, routers)
    steps, prices, block_s = _step_times(file, hosts)
    topology = Topology(
        name=file.convert(file.value.get("name", path.stem), str, ("name",)),
        root=root,
        hosts=hosts,
        routers=routers,
        faults=tuple(faults),
        scaling=tuple(scaling),
        steps=steps,
        prices=prices,
        block_s=block_s,
    )
    num_hosts = _num_hosts(root, routers)
    if num_hosts > MAX_HOSTS:
        raise file.error(("root",), f"{num_hosts:,} hosts are more than {MAX_HOSTS:,}")
    return topology


def _check_children(
    file: YamlFile, hosts: dict[str, HostKind], routers: dict[str, RouterKind]
) -> None:
    for name in hosts.keys() & routers.keys():
        raise file.error(("routers", name), f"{name} is the name of a host, too")
    for name, router in routers.items():
        for child in router.children:
            place = ("routers", name, "children", child)
            if child not in hosts and child not in routers:
                raise file.error(place, f"{child} is none of hosts and routers")
        roles = {hosts[it].role if it in hosts else None for it in router.children}
        if roles == {Role.PREFILL}:
            raise file.error(
                ("routers", name), f"{name} has prefill hosts alone, and none that answers"
            )


def _check_cycles(file: YamlFile, routers: dict[str, RouterKind]) -> None:
    heights: dict[str, int] = {}

    def visit(name: str, above: tuple[str, ...]) -> int:
        """Levels of routers from this one down."""
        if name in above:
            way = " → ".join((*above[above.index(name) :], name))
            place = ("routers", above[-1], "children", name)
            raise file.error(place, f"{name} would contain itself ({way})")
        if name not in heights and len(above) < MAX_LEVELS:
            below = [child for child in routers[name].children if child in routers]
            heights[name] = 1 + max((visit(it, (*above, name)) for it in below), default=0)
        if len(above) + heights.get(name, 1) > MAX_LEVELS:
            raise file.error(("routers", name), f"routers stand in more than {MAX_LEVELS} levels")
        return heights[name]

    for name in routers:
        visit(name, ())


def _check_all_are_used(
    file: YamlFile, root: str, hosts: dict[str, HostKind], routers: dict[str, RouterKind]
) -> None:
    reached = [root]
    for kind in reached:
        children = routers[kind].children if kind in routers else ()
        reached += [child for child in children if child not in reached]
    for section, kinds in (("hosts", hosts), ("routers", routers)):
        for name in kinds:
            if name not in reached:
                raise file.error((section, name), f"{name} is not behind the root")


def _num_hosts(root: str, routers: dict[str, RouterKind]) -> int:
    @cache
    def count(kind: str) -> int:
        if kind not in routers:
            return 1
        return sum(number * count(child) for child, number in routers[kind].children.items())

    return count(root)


def _check_fault(
    file: YamlFile,
    place: tuple[str, int],
    rule: FaultRule,
    root: str,
    hosts: dict[str, HostKind],
    routers: dict[str, RouterKind],
) -> None:
    inner = (*place, "what")
    if rule.what not in hosts and rule.what not in routers:
        raise file.error(inner, f"{rule.what} is none of hosts and routers")
    if rule.what == root:
        raise file.error(
            inner, f"{root} is the root, which clients ask; faults are of what is behind it"
        )
    if rule.kind != "fail" and rule.what in hosts:
        raise file.error(place, f"{rule.kind} is for routers; of hosts there is fail")
    if (rule.every_s is None) == (rule.at_s is None):
        raise file.error(place, "a fault has either every_s or at_s")


def _check_scaling(
    file: YamlFile,
    number: int,
    rules: list[ScalingRule],
    hosts: dict[str, HostKind],
    routers: dict[str, RouterKind],
) -> None:
    rule, place = rules[number], ("scaling", number)
    if rule.what not in routers:
        raise file.error((*place, "what"), f"scaling.{number}.what: {rule.what} is none of routers")
    if rule.what in (other.what for other in rules[:number]):
        raise file.error((*place, "what"), f"{rule.what} has a rule of scaling already")
    children = routers[rule.what].children
    if not children.keys() <= hosts.keys():
        raise file.error(place, f"{rule.what} has other routers behind it, and hosts are scaled")
    if rule.timetable and len(children) > 1:
        raise file.error(
            place, f"{rule.what} has hosts of several kinds, which no timetable tells apart"
        )
    planned = ("slo", "interval_s", "step_s", "token_s", "lead_s", "hold_s")
    default = ScalingRule(what=rule.what)
    idle = [name for name in planned if getattr(rule, name) != getattr(default, name)]
    if rule.timetable and idle:
        raise file.error(
            (*place, idle[0]), f"{idle[0]} is for a planner; leave it out beside a timetable"
        )
    if list(rule.timetable) != sorted(rule.timetable, key=lambda it: it.at_s):
        raise file.error(
            (*place, "timetable"), "a timetable goes from the earliest time to the latest"
        )
    fewest = max(rule.least, rule.begin or 0)
    if fewest > sum(children.values()):
        raise file.error(place, f"{rule.what} has fewer than {fewest} hosts behind it")


def _step_times(
    file: YamlFile, hosts: dict[str, HostKind]
) -> tuple[dict[str, StepTimes], dict[str, float], dict[str, float]]:
    devices = device_table(file.section("devices", Device))
    model = _model(file)
    steps: dict[str, StepTimes] = {}
    prices: dict[str, float] = {}
    block_s: dict[str, float] = {}
    for name, host in hosts.items():
        place, given = ("hosts", name), host.block_ms
        if bool(host.device) == bool(host.steps):
            raise file.error(place, f"{name} is to have either a device or steps")
        if host.steps:
            steps[name] = read_step_times(
                file.path.parent / host.steps, f"{FLAG}: hosts.{name}.steps"
            )
            prices[name] = host.price_per_hour or 0.0
            block_s[name] = 0.001 if given is None else given / 1000
            continue
        if host.device not in devices:
            known = ", ".join(sorted(devices))
            raise file.error((*place, "device"), f"{host.device} is none of {known}")
        if model is None:
            raise file.error((), "model is missing: the name of a preset, or a shape")
        device = devices[host.device]
        try:
            steps[name] = roofline(model, device, host.devices, host.block_size)
        except ConfigError as error:
            raise file.error(place, f"{name}: {error}") from None
        price = host.devices * device.price_per_hour
        prices[name] = price if host.price_per_hour is None else host.price_per_hour
        rate = host.devices * device.link_gb_per_s * 1e9
        linked_s = host.block_size * model.kv_bytes_per_token / rate
        block_s[name] = linked_s if given is None else given / 1000
    return steps, prices, block_s


def _model(file: YamlFile) -> ModelShape | None:
    given = file.value.get("model")
    if given is None or not isinstance(given, str):
        return None if given is None else file.convert(given, ModelShape, ("model",))
    shape = model_shape(given)
    if shape is None:
        raise file.error(
            ("model",), f"{given} is no preset; give a shape, or one of `pagoda models`"
        )
    return shape
