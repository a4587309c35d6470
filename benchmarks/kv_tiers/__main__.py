# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.kv_tiers COMMAND`: what KV tiers are good for, and what they cost."""

from __future__ import annotations

from cyclopts import App

_COMMANDS = {
    "ttft": "Time to the first token of long prompts from SSD after a restart, beside computing them.",
    "chat": "Prompt tokens computed for conversations that outgrow the device, with and without tiers.",
    "no-reuse": "Throughput of prompts that never return, with and without tiers.",
    "stream": "Answers beside a request whose KV does not fit the device.",
    "long": "Prompt and tokens of one context that grows far beyond the device, at each depth.",
    "swap": "Throughput of requests that outgrow the device together, with a disk and without tiers.",
    "bandwidth": "Blocks between a worker and SSD, beside plain copies of as many bytes.",
}


def main() -> int:
    """Runs one of them."""
    app = App(name="python -m benchmarks.kv_tiers", help=__doc__, result_action="return_value")
    for name, summary in _COMMANDS.items():
        module = name.replace("-", "_")
        app.command(f"benchmarks.kv_tiers.{module}:{module}", name=name, help=summary)
    app()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
