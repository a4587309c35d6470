# SPDX-License-Identifier: Apache-2.0
"""Planning: how many hosts of which role the pools of a router need for an objective.

figures   values that go in and come out, which are recorded
capacity  hosts that keep an objective, from the cost of a step
policy    the plan: a pure function
journal   decisions with their inputs, and their replay
router    figures of a router, and changes of its hosts' roles
outputs   the plan for autoscalers, and for a webhook
command   `pagoda plan`
"""

from pagoda.cli.command import Command, CommandPlugin

COMMANDS = CommandPlugin(
    {
        "plan": Command("Plan how many hosts a router needs."),
        "plan run": Command(
            "Plan the hosts of a router for an objective, and tell autoscalers.",
            "pagoda.plugins.plan.command:run",
        ),
        "plan replay": Command(
            "Decide again what a journal of decisions says, and compare.",
            "pagoda.plugins.plan.command:replay",
        ),
    }
)
