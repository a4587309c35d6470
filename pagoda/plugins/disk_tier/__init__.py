# SPDX-License-Identifier: Apache-2.0
"""The KV tier on disk: `--kv-disk-path` and `pagoda kv`. Importing this imports neither half of it."""

from pagoda.cli.command import Command, CommandPlugin
from pagoda.kv.plugin import KVTierPlugin

TIER = KVTierPlugin(
    options="pagoda.plugins.disk_tier.options:DiskOptions",
    configure="pagoda.plugins.disk_tier.directory:configure",
    engine_half="pagoda.plugins.disk_tier.tier:open_tier",
    worker_half="pagoda.plugins.disk_tier.transfers:open_tier",
)

COMMANDS = CommandPlugin(
    {
        "kv": Command("Directories of KV blocks, as serve --kv-disk-path keeps them."),
        "kv ls": Command(
            "List the models whose KV blocks are in a directory, and what they take.",
            "pagoda.plugins.disk_tier.command:ls",
        ),
        "kv verify": Command(
            "Read every KV block in a directory, and list damaged ones.",
            "pagoda.plugins.disk_tier.command:verify",
        ),
        "kv clear": Command(
            "Remove the KV blocks in a directory.", "pagoda.plugins.disk_tier.command:clear"
        ),
    }
)
