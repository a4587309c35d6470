# SPDX-License-Identifier: Apache-2.0
"""Manifests are what Kubernetes takes, and their commands are what `pagoda` takes."""

from __future__ import annotations

import json
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
from pagoda.cli.plugin_flags import ConnectorOptions
from pagoda.fleet.replica import QUERY_TIMEOUT_S
from pagoda.ipc.addresses import Advertised, parse_address
from pagoda.ipc.amounts import parse_bytes
from pagoda.ipc.curve import keys_of
from pagoda.plugins.batches.directory import MAX_TEMPORARY_BYTES
from pagoda.plugins.router.discovery.choice import registering

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
DOCKERFILES = [DEPLOY / name / "Dockerfile" for name in ("kubernetes", "ray")]
COMPOSE = DEPLOY / "compose" / "compose.yaml"
LONGEST_ANSWER_S = 600
"""Seconds that an answer may take which a router or a host finishes before it ends."""
LONGEST_LOAD_S = 3600
"""Seconds for which a model may load, from a slow disk or a hub, before Kubernetes ends its pod."""
BUSY_S = 60
"""Seconds for which an event loop may be busy before Kubernetes ends its pod."""
UNIT = DEPLOY / "systemd" / "pagoda.service"


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
        cluster = bound.arguments["cluster"]
        ports = {port["containerPort"] for port in container["ports"]}
        if arguments[0] == "serve":
            join = bound.arguments["plugins"].router.join
            assert cluster.port in ports
            for router in join.split(","):
                parse_address(router, "--join", fixed=True)
            registering(join, keys_of(b"a secret of all hosts and routers"))
            advertised = Advertised.parse(cluster.advertise).host
            handed = bound.arguments.get("connector", ConnectorOptions()).config(
                secret, lambda host=advertised: host, 1
            )
            assert handed is None or handed.engine.port in {0, *ports}
        assert bound.arguments["server"].port in ports
        [mount] = [it for it in container["volumeMounts"] if it["name"] == "key"]
        assert str(cluster.cluster_key_file) == f"{mount['mountPath']}/cluster.key"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_selectors_and_names_go_together(path: Path) -> None:
    labels = []
    for whole, container in workloads(path):
        template = whole["spec"]["template"]
        labels.append(template["metadata"]["labels"])
        assert whole["spec"]["selector"]["matchLabels"] == labels[-1]
        volumes, mounts = template["spec"]["volumes"], container["volumeMounts"]
        assert {one["name"] for one in volumes} == {one["name"] for one in mounts}
        grace_s = template["spec"]["terminationGracePeriodSeconds"]
        assert drain_s(container["args"]) + 10 <= grace_s
    budgets = []
    for whole in objects(path):
        if whole["kind"] == "Service":
            assert whole["spec"]["selector"] in labels
        if whole["kind"] == "PodDisruptionBudget":
            budgets.append(whole["spec"]["selector"]["matchLabels"])
    assert sorted(map(str, budgets)) == sorted(map(str, labels))


def drain_s(arguments: list[str]) -> int:
    """Seconds for which a server that ends finishes answers: no less than the longest answer may take."""
    [drain] = [text for text in arguments if text.startswith("--drain-timeout=")]
    seconds = int(drain.partition("=")[2])
    assert seconds >= LONGEST_ANSWER_S
    return seconds


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_pods_are_spread_and_may_do_little(path: Path) -> None:
    for whole, container in workloads(path):
        template = whole["spec"]["template"]
        [spread] = template["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"] == template["metadata"]["labels"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"
        context, own = template["spec"]["securityContext"], container["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"]) == (True, 1000)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert (own["readOnlyRootFilesystem"], own["allowPrivilegeEscalation"]) == (True, False)
        assert own["capabilities"] == {"drop": ["ALL"]}
        places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert places["tmp"] == "/tmp"
        [room] = [one for one in template["spec"]["volumes"] if one["name"] == "tmp"]
        assert parse_bytes(room["emptyDir"]["sizeLimit"] + "B") > MAX_TEMPORARY_BYTES
        environment = {one["name"]: one.get("value") for one in container["env"]}
        assert environment["HF_HOME"] == places["models"]


def test_images_keep_no_compiler_and_one_tells_its_health() -> None:
    for path in DOCKERFILES:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        words = [line.split() for line in lines]
        known = {"FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "HEALTHCHECK", "ENTRYPOINT"}
        assert {line[0] for line in words} <= known
        stages = [index for index, line in enumerate(words) if line[0] == "FROM"]
        assert words[stages[0]][-2:] == ["AS", "build"]
        build, final = (
            " ".join(lines[slice(*part)]) for part in ((0, stages[1]), (stages[1], None))
        )
        assert "g++" in build
        assert "g++" not in final
        assert "COPY --from=build /opt/pagoda /opt/pagoda" in final
        assert "USER " in final
    text = DOCKERFILES[0].read_text(encoding="utf-8")
    probe = json.loads(text.partition("    CMD ")[2].splitlines()[0])
    assert probe[:2] == ["python", "-c"]
    compile(probe[2], "healthcheck", "exec")
    assert "/health/live" in probe[2]


def test_the_compose_file_builds_the_image_and_ends_after_the_drain() -> None:
    compose = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
    server = compose["services"]["pagoda"]
    context = COMPOSE.parent / server["build"]["context"]
    assert (context / server["build"]["dockerfile"]).resolve() == DOCKERFILES[0]
    arguments = server["command"]
    build_app().parse_args(arguments, exit_on_error=False, print_error=False)
    assert int(server["stop_grace_period"].removesuffix("s")) > drain_s(arguments)
    assert (server["read_only"], server["cap_drop"], server["tmpfs"]) == (True, ["ALL"], ["/tmp"])
    volume, _, place = server["volumes"][0].partition(":")
    assert volume in compose["volumes"]
    assert server["environment"]["HF_HOME"] == place
    prometheus = compose["services"]["prometheus"]
    files = [mount.split(":")[0] for mount in prometheus["volumes"]]
    assert all((COMPOSE.parent / file).is_file() for file in files)
    content = yaml.safe_load(compose["configs"]["prometheus"]["content"])
    assert content["rule_files"] == [Path(file).name for file in files]
    [[target]] = [one["targets"] for one in content["scrape_configs"][0]["static_configs"]]
    assert target == "pagoda:8000"


def test_prometheus_finds_every_router_and_host() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    monitor, policy = objects(DEPLOY / "prometheus" / "podmonitor.yaml")
    validator.validate(policy, "1.37", strict=True)
    assert (monitor["kind"], monitor["metadata"]["name"]) == ("PodMonitor", "pagoda")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    for path in MANIFESTS:
        for whole, container in workloads(path):
            assert wanted <= whole["spec"]["template"]["metadata"]["labels"].items()
            assert endpoint["port"] in {port.get("name") for port in container["ports"]}
    [allowed] = policy["spec"]["ingress"]
    assert allowed["ports"] == [{"protocol": "TCP", "port": endpoint["port"]}]


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
