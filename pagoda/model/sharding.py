"""Which part of a model one rank holds (Shoeybi et al. 2019, Megatron-LM).

Maps from hidden states are split by outputs, maps back to them by inputs, so that a layer needs two sums over all
ranks: behind attention and behind the MLP. Embedding and head are split by the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.model.config import ModelConfig
from pagoda.parallel.config import ParallelConfig, RankPlace


@dataclass(frozen=True)
class Shard:
    """One rank's part."""

    tp_rank: int = 0
    tp_size: int = 1
    layers: range | None = None
    """Of the stage; None means all."""
    is_first: bool = True
    """Whether the stage embeds tokens."""
    is_last: bool = True
    """Whether the stage has the head and samples."""
    expert_parallel: bool = False

    def slice_of(self, size: int) -> slice:
        """This rank's part of `size` things, such as inner channels, cut between groups of quantized weights."""
        unit = next((unit for unit in (128, 64, 32) if size % (unit * self.tp_size) == 0), 1)
        each = -(-size // (unit * self.tp_size)) * unit
        return slice(min(size, self.tp_rank * each), min(size, (self.tp_rank + 1) * each))

    def kv_heads(self, num_kv_heads: int) -> slice:
        """This rank's KV heads; with more ranks than KV heads, several ranks hold the same one."""
        if num_kv_heads >= self.tp_size:
            return self.slice_of(num_kv_heads)
        head = self.tp_rank * num_kv_heads // self.tp_size
        return slice(head, head + 1)


def shard_of(config: ModelConfig, parallel: ParallelConfig, place: RankPlace) -> Shard:
    """What the rank at `place` holds."""
    stages = split_layers(config, parallel.pipeline_parallel_size)
    return Shard(
        tp_rank=place.tp,
        tp_size=parallel.tensor_parallel_size,
        layers=stages[place.pp],
        is_first=place.pp == 0,
        is_last=place.pp == len(stages) - 1,
        expert_parallel=parallel.expert_parallel,
    )


def split_layers(config: ModelConfig, num_stages: int) -> list[range]:
    """The layers of each stage, so that the costliest stage is as cheap as can be.

    The cost of a stage is the weights that a token is multiplied with; the head counts on the last one.
    """
    raise NotImplementedError
