# SPDX-License-Identifier: Apache-2.0
"""The address of KV events, and the ports of replicas from it on."""

from __future__ import annotations

import re

import msgspec

from pagoda.errors import ConfigError


class KVEventsAddress(msgspec.Struct, frozen=True):
    """Address of KV events: of n replicas, replica i publishes at `port + i` and replays at `port + n + i`."""

    host: str
    """An address or the name of an interface of this host, `*` for all of them; IPv6 in brackets."""
    port: int

    @classmethod
    def parse(cls, address: str) -> KVEventsAddress:
        """Raises ConfigError if `address` is not `tcp://HOST:PORT`."""
        match = re.fullmatch(r"tcp://(\[[^][/@ ]+\]|[^][/@ :]+):([0-9]{1,5})", address)
        if match is None:
            raise ConfigError(
                f"--kv-events must be tcp://HOST:PORT, such as tcp://127.0.0.1:5557, got {address!r}."
            )
        config = cls(match[1], int(match[2]))
        config.check_ports(1)
        return config

    def check_ports(self, num_replicas: int) -> None:
        """Raises ConfigError if there are too few ports from `port` on."""
        count = 2 * num_replicas
        if not 1 <= self.port <= 2**16 - count:
            raise ConfigError(
                f"--kv-events takes {count} ports from PORT on, so PORT must be 1 to {2**16 - count}, "
                f"got {self.port}."
            )

    def publish_port(self, replica: int) -> int:
        return self.port + replica

    def replay_port(self, replica: int, num_replicas: int) -> int:
        return self.port + num_replicas + replica
