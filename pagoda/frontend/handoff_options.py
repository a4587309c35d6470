"""The flags of prefill/decode handoff, and what an engine and its workers are told of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from pagoda.engine.config import HandoffConfig
from pagoda.errors import ConfigError
from pagoda.frontend.fleet import read_cluster_secret
from pagoda.ipc.curve import keys_of
from pagoda.messages.worker_config import KVHandoffConfig, Role
from pagoda.pd.transport.choose import TRANSPORTS


class Handoff(NamedTuple):
    engine: HandoffConfig
    workers: KVHandoffConfig


@Parameter(name="*", group=Group("Prefill and decode apart", sort_key=27))
@dataclass(frozen=True, kw_only=True)
class HandoffOptions:
    """Options of prefill/decode handoff: the part that this host computes, and the way of KV between hosts."""

    role: Literal["none", "prefill", "decode", "both"] = "none"
    """prefill computes prompts and holds their KV for others; decode fetches it and generates; both does
    either."""
    kv_transports: Annotated[str, Parameter(metavar="LIST")] = "shm,tcp"
    """Ways that KV may take between hosts, the best first: shm (within one machine), tcp, nixl, mooncake."""
    kv_lease: Annotated[float, Parameter(validator=Number(gte=1, lte=3600))] = 30.0
    """Seconds for which KV is held for a host that does not renew its request."""
    kv_port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 0
    """Port at which other hosts ask for KV, and the next ones for further replicas; 0 takes free ports."""
    kv_encrypt: bool = False
    """Encrypt KV between hosts; hosts that ask for KV must know the cluster's secret in any case."""

    def config(
        self, *, cluster_key_file: Path | None, advertise: str, num_replicas: int
    ) -> Handoff | None:
        """None without a role.

        Raises:
            ConfigError: a flag lacks another, or says what is not possible.
        """
        role = Role(self.role)
        if role is Role.NONE:
            self._refuse_without_role()
            return None
        if cluster_key_file is None:
            raise ConfigError(
                f"--role {self.role} needs --cluster-key-file, a secret that all hosts have in common."
            )
        if self.kv_port + num_replicas - 1 > 65535:
            raise ConfigError(
                f"--kv-port {self.kv_port} leaves too few ports for {num_replicas} replicas."
            )
        if self.kv_port and not role.holds_kv:
            raise ConfigError(
                "--kv-port needs --role prefill or both: decode hosts ask, nobody asks them."
            )
        secret = read_cluster_secret(cluster_key_file)
        return Handoff(
            HandoffConfig(
                role=role,
                host=advertise,
                port=self.kv_port,
                keys=keys_of(secret),
                lease_s=self.kv_lease,
            ),
            KVHandoffConfig(
                role=role,
                transports=self._transports(),
                host=advertise,
                secret=secret,
                encrypts=self.kv_encrypt,
            ),
        )

    def _transports(self) -> tuple[str, ...]:
        names = tuple(name.strip() for name in self.kv_transports.split(","))
        if len(set(names)) < len(names) or not set(names) <= TRANSPORTS.keys():
            raise ConfigError(
                f"--kv-transports takes some of {', '.join(TRANSPORTS)}, each once, such as shm,tcp, "
                f"got {self.kv_transports!r}."
            )
        return names

    def _refuse_without_role(self) -> None:
        for name in ("kv_transports", "kv_lease", "kv_port", "kv_encrypt"):
            if getattr(self, name) != getattr(_DEFAULT, name):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} needs --role prefill, decode or both.")


_DEFAULT = HandoffOptions()
