# SPDX-License-Identifier: Apache-2.0
"""Number of devices of a server, and the device of each rank: the only place that knows.

Ranks are counted replica by replica, in it stage by stage, in it context rank by context rank, in it tensor rank
by tensor rank, and take the devices in that order: those that talk most sit next to each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pagoda.devices import HOST_KIND, DeviceSet, check_devices
from pagoda.errors import ConfigError

MAX_RANKS = 4096
_CHANNEL_UNITS = (128, 64, 32)
"""The sizes of groups of quantized weights."""


def can_share_heads(num_heads: int, num_kv_heads: int, tp_size: int) -> bool:
    """Returns True if all ranks get equally many heads and the KV heads for them; ranks may share a KV head."""
    kv_heads_fit = num_kv_heads % tp_size == 0 or tp_size % num_kv_heads == 0
    return num_heads % tp_size == 0 and kv_heads_fit


def channel_share(count: int, tp_rank: int, tp_size: int) -> range:
    """A rank's part of inner channels or of the vocabulary; not empty where there are as many as ranks.

    Parts begin at multiples of 128, or else of 64 or 32, where that is possible, so that groups of quantized
    weights stay whole. Smaller groups take up to a sixteenth more memory: for that much in the largest part,
    larger ones are kept.
    """
    units = [unit for unit in _CHANNEL_UNITS if count % unit == 0 and count >= unit * tp_size]
    unit = next(
        (
            unit
            for unit in units
            if -(-count // (unit * tp_size)) * unit * tp_size * 16 <= count * 17
        ),
        units[-1] if units else 1,
    )
    share = even_share(count // unit, tp_rank, tp_size)
    return range(share.start * unit, share.stop * unit)


def even_share(count: int, rank: int, ranks: int) -> range:
    """A rank's part of heads, or of experts under expert parallelism; shares differ by one at most."""
    return range(count * rank // ranks, count * (rank + 1) // ranks)


class RankPlace(msgspec.Struct, frozen=True, order=True):
    """One worker's coordinates."""

    dp: int = 0
    """Number of the replica."""
    pp: int = 0
    """Number of the stage in the replica."""
    tp: int = 0
    """Tensor-parallel rank in the stage."""
    cp: int = 0
    """Context-parallel rank in the stage."""

    @property
    def role(self) -> str:
        """Name of the rank's worker beside the other processes of a server."""
        return f"worker dp{self.dp} tp{self.tp} pp{self.pp}{self._context}"

    @property
    def in_replica(self) -> str:
        """The rank's coordinates in its replica."""
        return f"pp{self.pp} tp{self.tp}{self._context}"

    @property
    def _context(self) -> str:
        return f" cp{self.cp}" if self.cp else ""

    def __str__(self) -> str:
        return f"dp{self.dp} {self.in_replica}"


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and devices. Raises ConfigError if a size is not positive or the devices do not fit the sizes."""

    data_parallel_size: int = 1
    """Replicas of the model, each with an engine of its own."""
    tensor_parallel_size: int = 1
    """Ranks that share every layer."""
    pipeline_parallel_size: int = 1
    """Stages, each with some of the layers."""
    context_parallel_size: int = 1
    """Ranks that share the KV of every request: each holds some of its segments."""
    devices: tuple[str, ...] = ()
    """Devices of each rank by name, such as `cpu:0`, or `npu:0+npu:1` for a rank that drives both; empty takes the
    first ones. See `devices.num_cpu_devices`."""
    expert_parallel: bool = False
    """True if the tensor-parallel ranks share out whole experts instead of parts of every expert."""
    dp_attention: bool = False
    """True if each tensor-parallel rank attends to requests of its own, with all heads."""

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "context"):
            name += "_parallel_size"
            size = getattr(self, name)
            if not 1 <= size <= MAX_RANKS:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be from 1 to {MAX_RANKS}, got {size}.")
        if self.num_ranks > MAX_RANKS:
            raise ConfigError(
                f"{self._product()} devices; a server takes at most {MAX_RANKS}: lower one of the sizes."
            )
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "--enable-expert-parallel shares out experts among tensor-parallel ranks; "
                "give --tensor-parallel-size 2 or more, or leave it out."
            )
        if self.dp_attention and self.tensor_parallel_size == 1:
            raise ConfigError(
                "--enable-dp-attention gives each tensor-parallel rank requests of its own; "
                "give --tensor-parallel-size 2 or more, or leave it out."
            )
        if self.dp_attention and self.context_parallel_size > 1:
            raise ConfigError(
                "--enable-dp-attention keeps a request's KV on one rank, and --context-parallel-size "
                f"{self.context_parallel_size} spreads it; leave one of them out."
            )
        check_devices(self.devices)
        if self.devices and len(self.devices) != self.num_ranks:
            raise ConfigError(
                f"{self._product()} devices, {len(self.devices)} given (--devices {','.join(self.devices)}); "
                f"name {self.num_ranks}, or change a size."
            )

    def _product(self) -> str:
        sizes = {
            "dp": self.data_parallel_size,
            "tp": self.tensor_parallel_size,
            "pp": self.pipeline_parallel_size,
        }
        if self.context_parallel_size > 1:
            sizes["cp"] = self.context_parallel_size
        return f"{' × '.join(sizes)} = {' × '.join(map(str, sizes.values()))} = {self.num_ranks}"

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.stage_size * self.pipeline_parallel_size

    @property
    def stage_size(self) -> int:
        """Ranks of one stage."""
        return self.tensor_parallel_size * self.context_parallel_size

    @property
    def attention_ranks(self) -> int:
        """Ranks of a stage that each hold the KV of requests of their own."""
        return self.tensor_parallel_size if self.dp_attention else 1

    @property
    def num_pools(self) -> int:
        """Ranks of a stage that each hold other blocks of the KV cache."""
        return self.context_parallel_size * self.attention_ranks

    def pool_of(self, place: RankPlace) -> int:
        """Number, in its stage, of the blocks that a rank holds."""
        return place.tp if self.dp_attention else place.cp

    @property
    def num_ranks(self) -> int:
        return self.data_parallel_size * self.replica_size

    def places(self, dp: int) -> Iterator[RankPlace]:
        """The ranks of a replica, in order."""
        for pp in range(self.pipeline_parallel_size):
            for cp in range(self.context_parallel_size):
                for tp in range(self.tensor_parallel_size):
                    yield RankPlace(dp, pp, tp, cp)

    def rank_in_replica(self, place: RankPlace) -> int:
        return place.pp * self.stage_size + self.rank_in_stage(place)

    def rank_in_stage(self, place: RankPlace) -> int:
        return place.cp * self.tensor_parallel_size + place.tp

    def groups_of(self, place: RankPlace) -> dict[str, list[RankPlace]]:
        """The ranks of each group that a rank is in, in order: those of its `stage`, and where these are both
        `tensor` and `context` ranks, those of each kind. Groups of one are not there."""
        stage = [it for it in self.places(place.dp) if it.pp == place.pp]
        found = {"stage": stage} if len(stage) > 1 else {}
        if self.tensor_parallel_size > 1 and self.context_parallel_size > 1:
            found["tensor"] = [it for it in stage if it.cp == place.cp]
            found["context"] = [it for it in stage if it.tp == place.tp]
        return found

    def sampling_place(self, dp: int) -> RankPlace:
        """The rank that samples for its replica, and answers the engine."""
        return RankPlace(dp, self.pipeline_parallel_size - 1, 0)

    def devices_of(self, place: RankPlace, kind: str = HOST_KIND) -> DeviceSet:
        """Devices of a rank; where none are named, the device of the rank's number of a kind."""
        rank = place.dp * self.replica_size + self.rank_in_replica(place)
        return DeviceSet.parse(self.devices[rank]) if self.devices else DeviceSet(kind, (rank,))
