# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.handoff COMMAND`: what prefill and decode apart are good for, and what they cost."""

from __future__ import annotations

from cyclopts import App

_COMMANDS = {
    "itl": "Pauses of running streams while long prompts arrive: two hosts with a core each, and one with both.",
    "ttft": "What the handoff adds to the first and the second token, beyond computing the prompt.",
    "apart": "One host for prompts and two for answers against three that do both: the most that keep limits.",
    "threshold": "From which length of a prompt on it is worth to have it computed elsewhere.",
    "bandwidth": "KV between two processes over every transport, beside plain copies.",
}


def main() -> int:
    """Runs one of them."""
    app = App(name="python -m benchmarks.handoff", help=__doc__, result_action="return_value")
    for name, summary in _COMMANDS.items():
        app.command(f"benchmarks.handoff.{name}:{name}", name=name, help=summary)
    app()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
