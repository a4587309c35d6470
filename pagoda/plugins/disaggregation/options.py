# SPDX-License-Identifier: Apache-2.0
"""Flags of `pagoda serve`: the part of a host, and the way of KV between hosts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter
from msgspec import Meta

from pagoda.errors import ConfigError
from pagoda.ipc.curve import keys_of, read_cluster_secret
from pagoda.llm.engine_options import Handoff
from pagoda.llm.option_fields import checked, flag_of, given_fields
from pagoda.messages.engine_config import HandoffConfig
from pagoda.messages.worker_config import KVHandoffConfig, Role


@Parameter(name="*", group=Group("Prefill and decode apart", sort_key=27))
@dataclass(frozen=True, kw_only=True)
class HandoffOptions:
    """Options of prefill/decode handoff: the part that this host computes, and the way of KV between hosts."""

    role: Literal["none", "prefill", "decode", "both"] = "none"
    """prefill computes prompts and holds their KV for others; decode fetches it and generates; both does
    either."""
    role_changes: bool = False
    """Let operators and routers change the role while this host runs: it opens what any role needs."""
    kv_transports: Annotated[str, Parameter(metavar="LIST")] = "shm,tcp"
    """Ways that KV may take between hosts, the best first: shm (within one machine), tcp, nixl, mooncake."""
    kv_lease: Annotated[float, Meta(ge=1, le=3600)] = 30.0
    """Seconds for which KV is held for a host that does not renew its request."""
    kv_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port at which other hosts ask for KV, and the next ones for further replicas; 0 takes free ports."""
    kv_encrypt: bool = False
    """Encrypt KV between hosts; hosts that ask for KV must know the cluster's secret in any case."""

    def config(
        self, *, cluster_key_file: Path | None, advertise: str, num_replicas: int
    ) -> Handoff | None:
        """None without a role. Raises ConfigError if a flag lacks another or has an impossible value."""
        options, role = checked(self), Role(self.role)
        if role is Role.NONE:
            for name in given_fields(options):
                raise ConfigError(f"{flag_of(name)} needs --role prefill, decode or both.")
            return None
        if cluster_key_file is None:
            raise ConfigError(
                f"--role {role} needs --cluster-key-file, a file with the secret that all hosts share."
            )
        if self.kv_port + num_replicas - 1 > 65535:
            raise ConfigError(
                f"--kv-port {self.kv_port} leaves too few ports for {num_replicas} replicas."
            )
        able = Role.BOTH if self.role_changes else role
        if self.kv_port and not able.holds_kv:
            raise ConfigError(
                "--kv-port needs --role prefill or both; no host fetches KV from a decode host."
            )
        from pagoda.plugins.disaggregation.transport.choose import TRANSPORTS  # with a role alone

        transports = tuple(name.strip() for name in self.kv_transports.split(","))
        if len(set(transports)) < len(transports) or not set(transports) <= TRANSPORTS.keys():
            raise ConfigError(
                f"--kv-transports takes some of {', '.join(TRANSPORTS)}, each once, such as shm,tcp, "
                f"got {self.kv_transports!r}."
            )
        secret = read_cluster_secret(cluster_key_file)
        return Handoff(
            HandoffConfig(
                role=able,
                first_role=role,
                host=advertise,
                port=self.kv_port,
                keys=keys_of(secret),
                lease_s=self.kv_lease,
            ),
            KVHandoffConfig(
                role=able,
                transports=transports,
                host=advertise,
                secret=secret,
                encrypts=self.kv_encrypt,
            ),
            stays_on_host="--kv-transports shm" if transports == ("shm",) else "",
        )
