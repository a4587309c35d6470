# SPDX-License-Identifier: Apache-2.0
"""Whole fleets in virtual time: routers, schedulers and KV caches as they are, devices and wires as models."""

from pagoda.cli.command import Command, CommandPlugin

COMMANDS = CommandPlugin(
    {
        "simulate": Command(
            "Run a fleet in virtual time: how many hosts, and which policies.",
            "pagoda.plugins.simulate.command:run",
        ),
        "simulate compare": Command(
            "Run two or more fleets under the same arrivals, and compare.",
            "pagoda.plugins.simulate.comparison:compare",
        ),
        "simulate recommend": Command(
            "Find the cheapest fleet that keeps an SLO.",
            "pagoda.plugins.simulate.recommendation:recommend",
        ),
        "simulate explain": Command(
            "Tell where one request waited, and why.",
            "pagoda.plugins.simulate.explanation:explain",
        ),
        "simulate fit": Command(
            "Fit step times to what pagoda bench steps has measured.",
            "pagoda.plugins.simulate.fitting:fit_steps",
        ),
    }
)
