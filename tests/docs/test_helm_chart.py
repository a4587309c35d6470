# SPDX-License-Identifier: Apache-2.0
"""The Helm chart, rendered by Helm: objects are what Kubernetes takes, and their commands are what `pagoda`
takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagoda.cli.main import build_app

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "pagoda"
OF_OTHERS = {"ScaledObject"}
"""Kinds without a schema: those of KEDA."""
HOST = {"resources": {"requests": {"cpu": "4"}}, "replicas": 2}
SCALED = {"enabled": True, "minReplicas": 1, "maxReplicas": 4}
APART: dict[str, Any] = {
    "model": "org/model-1.5b",
    "pools": [
        {"name": "prefill", "role": "prefill", "roleChanges": True, "autoscaling": SCALED, **HOST},
        {"name": "decode", "role": "decode", "autoscaling": SCALED, **HOST},
        {"name": "spare", "role": "none", "tolerations": [{"key": "gpu"}], **HOST},
    ],
    "router": {"replicas": 3, "epp": {"enabled": True}},
    "apiKeys": {"existingSecret": "keys", "plannerSecret": "planner"},
    "models": {"existingClaim": "models"},
    "clusterKey": {"existingSecret": "cluster"},
    "networkPolicy": {"clientsFrom": [{"namespaceSelector": {}}]},
    "planner": {
        "enabled": True,
        "changeRoles": True,
        "journalClaim": "journal",
        "externalMetrics": {"apiService": True, "caBundle": "Zm9v", "tlsSecret": "tls"},
    },
}
KEDA = {**APART, "planner": {"enabled": True, "scaler": "keda"}}
VALUES: dict[str, dict[str, Any]] = {"default": {}, "apart": APART, "keda": KEDA}


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    """All objects of a release `demo` in the namespace `prod`."""
    helm = pytest.importorskip("helm_python")
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="demo", namespace="prod")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [it for text in texts for it in yaml.safe_load_all(text) if it is not None]


def workloads(objects: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for whole in objects:
        if whole["kind"] in ("Deployment", "StatefulSet"):
            [container] = whole["spec"]["template"]["spec"]["containers"]
            yield whole, container


@pytest.fixture(params=VALUES, scope="module")
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return rendered(VALUES[request.param])


def test_every_object_has_the_form_that_kubernetes_asks_for(objects: list[dict[str, Any]]) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for whole in objects:
        if whole["kind"] not in OF_OTHERS:
            validator.validate(whole, "1.37", strict=True)
    names = [(whole["kind"], whole["metadata"]["name"]) for whole in objects]
    assert len(set(names)) == len(names)


def test_every_command_is_understood(objects: list[dict[str, Any]]) -> None:
    for _, container in workloads(objects):
        arguments = [text.replace("$(POD_IP)", "10.0.0.2") for text in container["args"]]
        app = build_app(arguments[0])
        _, bound, *_ = app.parse_args(arguments, exit_on_error=False, print_error=False)
        ports = {port["containerPort"] for port in container["ports"]}
        if arguments[0] == "serve":
            assert bound.arguments["cluster"].port in ports
        flags = dict(text.removeprefix("--").partition("=")[::2] for text in arguments)
        assert int(flags.get("kv-port") or 5610) in {5610, *ports}
        for probe in ("readinessProbe", "livenessProbe"):
            [(_, asked)] = [
                it for it in container[probe].items() if it[0].endswith(("Get", "Socket"))
            ]
            assert asked["port"] in {port["name"] for port in container["ports"]}


def test_selectors_budgets_and_volumes_go_together(objects: list[dict[str, Any]]) -> None:
    pods = {}
    for whole, container in workloads(objects):
        template = whole["spec"]["template"]
        labels, selector = template["metadata"]["labels"], whole["spec"]["selector"]["matchLabels"]
        assert selector.items() <= labels.items()
        pods[whole["metadata"]["name"]] = selector
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert {volume["name"] for volume in template["spec"]["volumes"]} == mounts
        drain = [arg for arg in container["args"] if arg.startswith("--drain-timeout=")]
        grace_s = template["spec"]["terminationGracePeriodSeconds"]
        assert all(int(arg.partition("=")[2]) + 10 <= grace_s for arg in drain)
        security = template["spec"]["securityContext"], container["securityContext"]
        assert (security[0]["runAsNonRoot"], security[1]["readOnlyRootFilesystem"]) == (True, True)
    assert len({str(selector) for selector in pods.values()}) == len(pods)
    budgets = [
        it["spec"]["selector"]["matchLabels"]
        for it in objects
        if it["kind"] == "PodDisruptionBudget"
    ]
    served = [selector for name, selector in pods.items() if not name.endswith("planner")]
    assert sorted(map(str, budgets)) == sorted(map(str, served))
    for whole in objects:
        if whole["kind"] == "Service":
            assert whole["spec"]["selector"] in pods.values()
        if whole["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            assert whole["spec"]["scaleTargetRef"]["name"] in pods


def test_hosts_and_the_planner_know_every_router_by_its_name(objects: list[dict[str, Any]]) -> None:
    [router] = [whole for whole, _ in workloads(objects) if whole["kind"] == "StatefulSet"]
    names = {f"demo-router-{i}.demo-routers" for i in range(router["spec"]["replicas"])}
    assert router["spec"]["serviceName"] == "demo-routers"
    for whole, container in workloads(objects):
        arguments = container["args"]
        if arguments[0] == "serve":
            [joins] = [arg for arg in arguments if arg.startswith("--join=")]
            told = set(joins.partition("=")[2].split(","))
            assert told == {f"{name}:5600" for name in names}, whole["metadata"]["name"]
        if arguments[0] == "plan":
            told = {arg.partition("=")[2] for arg in arguments if arg.startswith("--router=")}
            assert told == {f"http://{name}:8000" for name in names}


def test_pools_are_scaled_by_what_the_planner_tells_of_their_role() -> None:
    scalers = [it for it in rendered(APART) if it["kind"] == "HorizontalPodAutoscaler"]
    metrics = [one["spec"]["metrics"][0]["external"]["metric"] for one in scalers]
    assert [metric["selector"]["matchLabels"] for metric in metrics] == [
        {"role": role} for role in ("prefill", "decode")
    ]
    scalers = [it for it in rendered(KEDA) if it["kind"] == "ScaledObject"]
    places = [one["spec"]["triggers"][0]["metadata"]["valueLocation"] for one in scalers]
    assert places == ["pools.*.prefill", "pools.*.decode"]


def test_the_secret_of_the_cluster_is_made_and_kept() -> None:
    secrets = [it for it in rendered({}) + rendered({}) if it["kind"] == "Secret"]
    assert len({one["data"]["cluster.key"] for one in secrets}) == 2
    assert secrets[0]["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert not [it for it in rendered(APART) if it["kind"] == "Secret"]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"pools": [{"name": "a", "role": "some"}]}, "role"),
        ({"pools": []}, "pools"),
        ({"pools": [{"name": "router", "role": "none"}]}, "must not be called router"),
        ({"pools": [{"name": "a", "role": "none"}] * 2}, "must not be called a, which is taken"),
        ({"pools": [{"name": "a", "role": "none", "roleChanges": True}]}, "needs a role"),
        ({"planner": {"enabled": True}, "apiKeys": {"existingSecret": "x"}}, "plannerSecret"),
        ({"pools": [{"name": "a", "role": "none", "autoscaling": SCALED}]}, "planner.enabled"),
        ({"planner": {"enabled": True, "externalMetrics": {"apiService": True}}}, "caBundle"),
    ],
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any], reason: str) -> None:
    helm = pytest.importorskip("helm_python")
    with pytest.raises(helm.HelmError, match=reason):
        rendered(values)
