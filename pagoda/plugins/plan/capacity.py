# SPDX-License-Identifier: Apache-2.0
"""Number of hosts that keep an objective: steps of a linear cost, and queues with several servers.

A step takes b + c · tokens. A host with x requests a second, each of P prompt and G generated tokens, computes
x · (P + G) tokens a second, so its steps take b / (1 - c · x · (P + G)) on average: the time between tokens. A
prompt waits for others as in a queue M/M/n whose servers are the hosts (Gross et al., Fundamentals of Queueing
Theory, 5th edition, section 3.3). More hosts do not compute one prompt faster: an objective that leaves no time
to wait is read as one that leaves half the time of a prompt.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from pagoda.messages.worker_config import Role
from pagoda.plugins.plan.figures import Capacity, Slo

_SPREAD = 2.33
"""Standard deviations of a Poisson number of streams that 99 % do not exceed (square-root staffing)."""

_LEAST_WAIT = 0.5
"""Waiting that every objective allows, in times that a prompt takes."""


def hosts_needed(
    role: Role, rate: float, prompt: float, output: float, capacity: Capacity, slo: Slo, most: int
) -> int:
    """Least number of hosts of a role that keep `slo` at `rate` requests a second with `prompt` tokens to compute
    and `output` to generate; `most` + 1 if `most` do not. Prefill hosts generate nothing, decode hosts compute no
    prompts. Returns 1 without requests."""
    if rate <= 0:
        return 1
    computed = 0.0 if role is Role.DECODE else prompt
    generated = 0.0 if role is Role.PREFILL else output
    context = prompt + generated / 2
    numbers = range(1, most + 1)

    def is_enough(num_hosts: int) -> bool:
        streams = _streams(rate / num_hosts, computed, generated, context, capacity, slo)
        if streams is None:
            return False
        late = _late_share(num_hosts, rate, computed, streams, capacity, slo)
        return late <= (1 - slo.share) / 2

    return 1 + bisect_left(numbers, True, key=is_enough)


def _streams(
    rate: float, prompt: float, output: float, context: float, capacity: Capacity, slo: Slo
) -> float | None:
    """Mean number of streams of one host with `rate` requests a second; None if it cannot keep up with these, with
    their tokens or with their KV."""
    busy = capacity.token_s * rate * (prompt + output)
    if busy >= 1:
        return None
    step_s = capacity.step_s / (1 - busy)
    if output and step_s > slo.tpot_s:
        return None
    streams = rate * output * step_s
    most = streams + _SPREAD * math.sqrt(streams)
    if most > capacity.max_num_seqs or most * context > capacity.kv_tokens:
        return None
    return streams


def _late_share(
    num_hosts: int, rate: float, prompt: float, streams: float, capacity: Capacity, slo: Slo
) -> float:
    """Share of prompts that are not computed within the objective."""
    if not prompt:
        return 0.0
    room = capacity.max_num_batched_tokens - streams
    if room <= 0:
        return 1.0
    full_s = capacity.step_s + capacity.token_s * capacity.max_num_batched_tokens
    alone_s = capacity.step_s + capacity.token_s * (prompt + streams)
    service_s = max(alone_s, prompt / room * full_s)
    # A prompt also waits for the end of the step that runs.
    left_s = slo.ttft_s - (capacity.step_s + capacity.token_s * streams) / 2
    time = max(left_s / service_s - 1, _LEAST_WAIT)
    return waiting_tail(num_hosts, rate * service_s, time)


def waiting_tail(num_servers: int, load: float, time: float) -> float:
    """Probability that a request to M/M/n waits longer than `time` mean service times; `load` is in erlangs."""
    if load >= num_servers:
        return 1.0
    blocked = 1.0  # Erlang B, by its recursion over servers
    for servers in range(1, num_servers + 1):
        blocked = load * blocked / (servers + load * blocked)
    waits = blocked / (1 - load / num_servers * (1 - blocked))  # Erlang C
    return waits * math.exp(-(num_servers - load) * time)
