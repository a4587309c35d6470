# SPDX-License-Identifier: Apache-2.0
"""The latest plan over HTTP: for Prometheus, for the external metrics API of Kubernetes, and as JSON for KEDA."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

from pagoda.plugins.plan.figures import Plan

EXTERNAL_METRICS = "/apis/external.metrics.k8s.io/v1beta1"
"""The path of the API (k8s.io/metrics, pkg/apis/external_metrics/v1beta1)."""
HOSTS = "pagoda_plan_hosts"
_GROUP_VERSION = "external.metrics.k8s.io/v1beta1"


class PlanPage:
    """The routes of a planner."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        """The latest one; None before the first."""
        self.num_failures = 0
        """Windows without a plan, as the router did not answer."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/plan", self._show)
        app.router.add_get("/health/ready", self._ready)
        app.router.add_get(EXTERNAL_METRICS, self._resources)
        app.router.add_get(EXTERNAL_METRICS + "/namespaces/{namespace}/{metric}", self._values)
        return app

    def collect(self) -> Iterator[Metric]:
        """The figures of the latest plan, for the registry."""
        failed = GaugeMetricFamily(
            "pagoda_plan_failures", "Windows without a plan since the start."
        )
        failed.add_metric([], self.num_failures)
        yield failed
        hosts = GaugeMetricFamily(HOSTS, "Hosts that are to be there.", labels=["pool", "role"])
        need = GaugeMetricFamily(
            "pagoda_plan_needed_hosts", "Hosts that are needed now.", labels=["pool", "role"]
        )
        rate = GaugeMetricFamily(
            "pagoda_plan_requests_per_second", "Requests that the plan is for.", labels=["pool"]
        )
        enough = GaugeMetricFamily(
            "pagoda_plan_is_enough", "Whether the most hosts suffice.", labels=["pool"]
        )
        for pool in () if self.plan is None else self.plan.pools:
            rate.add_metric([pool.name], pool.rate)
            enough.add_metric([pool.name], pool.is_enough)
            for role, count in pool.hosts.items():
                hosts.add_metric([pool.name, role], count)
                need.add_metric([pool.name, role], pool.need[role])
        yield from (hosts, need, rate, enough)

    async def _metrics(self, _: web.Request) -> web.Response:
        body = generate_latest(self._registry)
        return web.Response(body=body, content_type="text/plain", charset="utf-8")

    async def _show(self, _: web.Request) -> web.Response:
        """Pools by name, with hosts by role, as KEDA's scaler metrics-api takes them."""
        pools = {} if self.plan is None else {pool.name: pool.hosts for pool in self.plan.pools}
        return web.json_response({"at_s": self.plan and self.plan.at_s, "pools": pools})

    async def _ready(self, _: web.Request) -> web.Response:
        return web.json_response({"ready": self.plan is not None}, status=200 if self.plan else 503)

    async def _resources(self, _: web.Request) -> web.Response:
        """An APIResourceList (k8s.io/apimachinery, pkg/apis/meta/v1)."""
        resource = {
            "name": HOSTS,
            "singularName": "",
            "namespaced": True,
            "kind": "ExternalMetricValueList",
            "verbs": ["get"],
        }
        return web.json_response(
            {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": _GROUP_VERSION,
                "resources": [resource],
            }
        )

    async def _values(self, request: web.Request) -> web.Response:
        """An ExternalMetricValueList: the values whose labels the selector asks for."""
        if request.match_info["metric"] != HOSTS:
            raise web.HTTPNotFound
        wanted = _selected(request.query.get("labelSelector", ""))
        at_s = 0.0 if self.plan is None else self.plan.at_s
        stamp = datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        items: list[dict[str, Any]] = [
            {"metricName": HOSTS, "metricLabels": labels, "timestamp": stamp, "value": str(count)}
            for pool in (() if self.plan is None else self.plan.pools)
            for role, count in pool.hosts.items()
            for labels in [{"pool": pool.name, "role": str(role)}]
            if wanted.items() <= labels.items()
        ]
        return web.json_response(
            {
                "kind": "ExternalMetricValueList",
                "apiVersion": _GROUP_VERSION,
                "metadata": {},
                "items": items,
            }
        )


def _selected(selector: str) -> dict[str, str]:
    """The labels of a selector of equalities, as an autoscaler's `matchLabels` are sent.
    Raises HTTPBadRequest: it is something else."""
    labels: dict[str, str] = {}
    for term in filter(None, selector.split(",")):
        name, sign, value = term.partition("=")
        if not sign or name.endswith("!"):
            raise web.HTTPBadRequest(text="labelSelector must be NAME=VALUE,...")
        labels[name.strip()] = value.removeprefix("=").strip()
    return labels
