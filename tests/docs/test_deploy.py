"""Manifests are what Kubernetes takes, and their commands are what `pagoda` takes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagoda.cli.main import build_app
from pagoda.frontend.discovery.addresses import Advertised, parse_address
from pagoda.frontend.discovery.flags import registering
from pagoda.frontend.engine_options import HandoffOptions
from pagoda.frontend.replica import QUERY_TIMEOUT_S
from pagoda.ipc.curve import keys_of

MANIFESTS = sorted((Path(__file__).parents[2] / "deploy" / "kubernetes").glob("*.yaml"))
LONGEST_LOAD_S = 3600
"""Seconds for which a model may load, from a slow disk or a hub, before Kubernetes ends its pod."""
BUSY_S = 60
"""Seconds for which an event loop may be busy before Kubernetes ends its pod."""
UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "pagoda.service"


def objects(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def workloads(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each with its only container."""
    for whole in objects(path):
        if whole["kind"] in ("Deployment", "StatefulSet"):
            [container] = whole["spec"]["template"]["spec"]["containers"]
            yield whole, container


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_object_has_the_form_that_kubernetes_asks_for(path: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for whole in objects(path):
        validator.validate(whole, "1.37", strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_command_is_understood(path: Path, tmp_path: Path) -> None:
    secret = tmp_path / "cluster.key"
    secret.write_text("a secret of all hosts and routers")
    for _, container in workloads(path):
        arguments = [text.replace("$(POD_IP)", "10.0.0.2") for text in container["args"]]
        _, bound, *_ = build_app().parse_args(arguments, exit_on_error=False, print_error=False)
        join = bound.arguments["join"]
        ports = {port["containerPort"] for port in container["ports"]}
        if arguments[0] == "serve":
            assert Advertised.parse(join.advertise).port in ports
            for router in join.join.split(","):
                parse_address(router, "--join", fixed=True)
            registering(join.join, keys_of(b"a secret of all hosts and routers"))
            handed = bound.arguments.get("handoff", HandoffOptions()).config(
                cluster_key_file=secret,
                advertise=Advertised.parse(join.advertise).host,
                num_replicas=1,
            )
            assert handed is None or handed.engine.port in {0, *ports}
        assert bound.arguments["server"].port in ports
        [mount] = container["volumeMounts"]
        assert str(join.cluster_key_file) == f"{mount['mountPath']}/cluster.key"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_selectors_and_names_go_together(path: Path) -> None:
    labels = []
    for whole, container in workloads(path):
        template = whole["spec"]["template"]
        labels.append(template["metadata"]["labels"])
        assert whole["spec"]["selector"]["matchLabels"] == labels[-1]
        [volume], [mount] = template["spec"]["volumes"], container["volumeMounts"]
        assert volume["name"] == mount["name"]
        grace_s = template["spec"]["terminationGracePeriodSeconds"]
        [drain] = [text for text in container["args"] if text.startswith("--drain-timeout=")]
        assert int(drain.partition("=")[2]) + 10 <= grace_s
    for whole in objects(path):
        if whole["kind"] == "Service":
            assert whole["spec"]["selector"] in labels


def test_hosts_join_every_router_by_its_name() -> None:
    [pool] = [path for path in MANIFESTS if path.name == "pool.yaml"]
    [router] = [whole for whole, _ in workloads(pool) if whole["kind"] == "StatefulSet"]
    names = {
        f"{router['metadata']['name']}-{index}.{router['spec']['serviceName']}:5600"
        for index in range(router["spec"]["replicas"])
    }
    for path in MANIFESTS:
        for _, container in workloads(path):
            for joins in re.findall(r"--join=(\S+)", " ".join(container["args"])):
                assert set(joins.split(",")) == names


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_probes_ask_for_readiness_and_life_and_wait_longer_than_the_server(path: Path) -> None:
    for _, container in workloads(path):
        readiness, liveness = container["readinessProbe"], container["livenessProbe"]
        assert readiness["httpGet"] == {"path": "/health/ready", "port": "http"}
        assert liveness["httpGet"] == {"path": "/health/live", "port": "http"}
        assert readiness["timeoutSeconds"] > QUERY_TIMEOUT_S + 1
        if "serve" in container["args"]:
            startup = container["startupProbe"]
            assert startup["httpGet"] == readiness["httpGet"]
            assert startup["timeoutSeconds"] > QUERY_TIMEOUT_S + 1
            assert startup["periodSeconds"] * startup["failureThreshold"] >= LONGEST_LOAD_S
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= BUSY_S


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd is not installed")
    unit = tmp_path / UNIT.name
    text = UNIT.read_text(encoding="utf-8")
    unit.write_text(text.replace("/opt/pagoda/bin/pagoda", sys.executable), encoding="utf-8")
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    options = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    assert (options["Type"], options["KillMode"]) == ("notify", "mixed")
    _, _, drain = options["ExecStart"].partition("--drain-timeout ")
    assert int(options["TimeoutStopSec"]) > int(drain)
