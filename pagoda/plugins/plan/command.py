# SPDX-License-Identifier: Apache-2.0
"""`pagoda plan run` and `pagoda plan replay`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import aiohttp
import msgspec
from aiohttp import web
from cyclopts import Group, Parameter
from cyclopts.validators import Number

from pagoda.cli import output
from pagoda.cli.openai_client import OpenAIClient, ServerError
from pagoda.cli.options import Count, GeneralOptions, Length, Seconds, TrustOptions
from pagoda.concurrency import event_loop
from pagoda.errors import ConfigError
from pagoda.ipc.addresses import parse_address
from pagoda.ipc.tls import ServerTls, TlsFiles
from pagoda.plugins.plan.figures import Capacity, Plan, PlanConfig, Slo
from pagoda.plugins.plan.journal import Journal
from pagoda.plugins.plan.journal import replay as replay_journal
from pagoda.plugins.plan.outputs import PlanPage
from pagoda.plugins.plan.router import RouterLink

_WEBHOOK_S = 10.0
_log = logging.getLogger(__name__)

Above0 = Annotated[float, Parameter(validator=Number(gt=0, lte=1e6))]


@Parameter(name="*", group=Group("Plan", sort_key=10))
@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The objective, and what one host can do."""

    slo_ttft: Above0 = 1.0
    """Seconds within which an answer is to begin."""
    slo_tpot: Above0 = 0.06
    """Seconds that tokens of an answer may be apart, on average."""
    slo_share: Annotated[float, Parameter(validator=Number(gte=0.5, lt=1))] = 0.99
    """The share of requests that are to keep both."""
    step_time: Above0
    """Seconds of a step without tokens."""
    token_time: Above0
    """Seconds by which each token makes a step longer."""
    max_num_seqs: Count = 256
    """Requests that a host runs at a time, as its flag says."""
    max_num_batched_tokens: Count = 2048
    """Tokens of the largest step of a host, as its flag says."""
    kv_tokens: Count = 2**53
    """Tokens that the KV cache of a host holds; by default all that come."""
    min_hosts: Length = 1
    """The fewest hosts of a pool, all roles together."""
    max_hosts: Count = 64
    """The most."""
    lead: Seconds = 180.0
    """Seconds from when a host is asked for until it answers."""
    hold: Seconds = 300.0
    """Seconds for which fewer hosts must do before a pool shrinks."""

    def config(self) -> PlanConfig:
        """Raises ConfigError: values contradict each other."""
        if self.min_hosts > self.max_hosts:
            raise ConfigError(
                f"--min-hosts {self.min_hosts} must be at most --max-hosts {self.max_hosts}."
            )
        return PlanConfig(
            slo=Slo(ttft_s=self.slo_ttft, tpot_s=self.slo_tpot, share=self.slo_share),
            capacity=Capacity(
                step_s=self.step_time,
                token_s=self.token_time,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                kv_tokens=self.kv_tokens,
            ),
            min_hosts=self.min_hosts,
            max_hosts=self.max_hosts,
            lead_s=self.lead,
            hold_s=self.hold,
        )


@Parameter(name="*", group=Group("Outputs", sort_key=20))
@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Ways by which others learn of the plan."""

    listen: Annotated[str, Parameter(metavar="HOST:PORT")] = "127.0.0.1:8090"
    """The address of /metrics, /plan and the external metrics API; port 0 takes a free one."""
    tls_certfile: Path | None = None
    """A PEM file with the certificate of this address, which Kubernetes' API server asks for."""
    tls_keyfile: Path | None = None
    """The PEM file of its key, if that is not in the same file."""
    journal: Path | None = None
    """A file to which every decision is added with its inputs, and whose memory is taken up at the start."""
    webhook: Annotated[str | None, Parameter(metavar="URL")] = None
    """A URL to which each plan that differs from the one before is posted as JSON."""
    change_roles: bool = False
    """Give hosts other roles as planned; without it nothing is changed."""

    @property
    def tls_files(self) -> TlsFiles:
        names = ("--tls-certfile", "--tls-keyfile", "--ssl-ca-certs")
        return TlsFiles(self.tls_certfile, self.tls_keyfile, None, names)


def run(
    *,
    router: Annotated[tuple[str, ...], Parameter(metavar="URL", negative=())],
    plan: PlanOptions,
    outputs: OutputOptions = OutputOptions(),
    interval: Annotated[float, Parameter(validator=Number(gte=1, lte=3600))] = 30.0,
    api_key: str | None = None,
    trust: TrustOptions = TrustOptions(),
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Plan the hosts of a router for an objective until SIGTERM or Ctrl-C, and tell autoscalers.

    Args:
        router: The URL of a pagoda route; may be repeated, for all routers of the same hosts.
        interval: Seconds between decisions.
        api_key: A key of the router with the scope look, and operate for --change-roles.
    """
    general.apply(default_level="info")
    config = plan.config()
    journal = Journal(config, outputs.journal)
    clients = [OpenAIClient(url, api_key, trust.context) for url in router]
    planner = Planner(journal, outputs, interval)
    event_loop.run(planner.run(clients, config))
    return 0


def replay(
    journal: Annotated[Path, Parameter(name="FILE")],
    /,
    *,
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Decide again what a journal of decisions says, and compare byte by byte. Returns 1 where a plan differs.

    Args:
        journal: The file given to pagoda plan run as --journal.
    """
    general.apply()
    num_decisions = 0
    for state in replay_journal(journal):
        num_decisions += bool(state.plan)
        if not state.is_same:
            output.stdout().print(f"{journal}:{state.line}: decided now: {state.plan.decode()}")
            return 1
    output.stdout().print(f"{num_decisions} decisions, all with the same bytes.")
    return 0


class Planner:
    """Decides once in an interval, and tells the plan."""

    def __init__(self, journal: Journal, outputs: OutputOptions, interval_s: float) -> None:
        self.page = PlanPage()
        self._journal = journal
        self._outputs = outputs
        self._interval_s = interval_s
        self._told: deque[bytes] = deque(maxlen=1)

    async def run(self, clients: Sequence[OpenAIClient], config: PlanConfig) -> None:
        """Serves until SIGTERM or SIGINT. Raises ConfigError: the address of `--listen` cannot be used."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        runner = web.AppRunner(self.page.app(), access_log=None)
        await runner.setup()
        try:
            await self._listen(runner)
            async with contextlib.AsyncExitStack() as stack:
                for client in clients:
                    await stack.enter_async_context(client)
                hooks = await stack.enter_async_context(aiohttp.ClientSession())
                link = RouterLink(clients, config.slo)
                while not stop.is_set():
                    await self.decide(link, hooks, time.time())
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._interval_s):
                            await stop.wait()
        finally:
            await runner.cleanup()

    async def _listen(self, runner: web.AppRunner) -> None:
        address = parse_address(self._outputs.listen, "--listen")
        host, _, port = address.rpartition(":")
        files = self._outputs.tls_files
        tls = ServerTls(files).context if files.paths else None
        number = 0 if port == "*" else int(port)
        site = web.TCPSite(runner, host.strip("[]"), number, ssl_context=tls)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"--listen {address} cannot be used ({error.strerror}).") from None
        _log.info("the plan is at %s:%d", host, runner.addresses[0][1])

    async def decide(
        self, link: RouterLink, hooks: aiohttp.ClientSession, at_s: float
    ) -> Plan | None:
        """One decision at a Unix time, told to all; None where there are no figures yet, the router does not give
        them, or the decision cannot be written down."""
        try:
            figures = await link.figures(at_s)
            plan = None if figures is None else self._journal.decide(figures)
        except (ServerError, ConfigError) as error:
            self.page.num_failures += 1
            _log.warning("no plan: %s", error)
            return None
        if plan is None:
            return None
        self.page.plan = plan
        if self._outputs.change_roles:
            await self._change_roles(plan, link)
        await self._tell(plan, hooks)
        return plan

    async def _change_roles(self, plan: Plan, link: RouterLink) -> None:
        for pool in plan.pools:
            for change in pool.changes:
                try:
                    await link.change(change)
                except (ServerError, ConfigError) as error:
                    _log.warning("host %s keeps its role: %s", change.host_id, error)
                else:
                    _log.info("host %s has the role %s", change.host_id, change.role)

    async def _tell(self, plan: Plan, hooks: aiohttp.ClientSession) -> None:
        """Posts the plan if it wants other hosts than the last one that was taken."""
        wanted = msgspec.json.encode([(pool.name, pool.hosts) for pool in plan.pools])
        url = self._outputs.webhook
        if url is None or wanted in self._told:
            return
        timeout = aiohttp.ClientTimeout(total=_WEBHOOK_S)
        headers = {"Content-Type": "application/json"}
        try:
            body = msgspec.json.encode(plan)
            async with hooks.post(url, data=body, headers=headers, timeout=timeout) as answer:
                answer.raise_for_status()
        except (aiohttp.ClientError, TimeoutError) as error:
            _log.warning("--webhook: the plan was not taken: %s", error)
        else:
            self._told.append(wanted)
