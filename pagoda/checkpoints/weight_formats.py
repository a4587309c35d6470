"""Formats of linear layers in memory: types of numbers and the bytes that they take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from pagoda.errors import ConfigError

if TYPE_CHECKING:
    from pagoda.checkpoints.model_config import LinearSpec

GROUP_SIZES = (32, 64, 128)
"""Numbers of inputs that may share a scale in a grouped weight, in memory."""


@dataclass(frozen=True)
class DenseFormat:
    """A `DenseWeight`."""


@dataclass(frozen=True)
class Int8Format:
    """An `Int8Weight`."""

    zero_points: bool = False


@dataclass(frozen=True)
class GroupedFormat:
    """A `GroupedWeight`."""

    bits: int
    group_size: int
    offsets: bool
    act_order: bool
    can_regroup: bool = True
    """True if a part may hold a group as several groups of the same scale."""


WeightFormat = DenseFormat | Int8Format | GroupedFormat


class Quantization(Protocol):
    """Quantized linear layers of a model and their formats."""

    @property
    def summary(self) -> str:
        """Summary for the operator, such as `int4 weights (groups of 32)`."""

    def format_of(self, linear: LinearSpec) -> WeightFormat:
        """Format of a whole linear layer; for a rank's part of it see `part_format`.
        Raises ConfigError: a layer of so many inputs cannot be held so."""


def format_bytes(held_as: WeightFormat, outputs: int, inputs: int, dense_itemsize: int) -> int:
    """Bytes of a linear layer; `dense_itemsize` is that of the activations' dtype."""
    weights = outputs * inputs
    if isinstance(held_as, DenseFormat):
        return weights * dense_itemsize
    if isinstance(held_as, Int8Format):
        return weights + (8 if held_as.zero_points else 4) * outputs
    per_group = 4 if held_as.offsets else 2
    order = 8 * inputs if held_as.act_order else 0
    return weights * held_as.bits // 8 + weights // held_as.group_size * per_group + order


def part_format(held_as: WeightFormat, num_inputs: int, part: range) -> WeightFormat | None:
    """Returns the format of the inputs `part` of a map of `num_inputs` held as `held_as`; None if there is none.

    Where groups are cut they become smaller ones of the same scale. Ordered groups, over which a rank's inputs lie
    scattered, become plain numbers.
    """
    if not isinstance(held_as, GroupedFormat) or len(part) == num_inputs:
        return held_as
    if held_as.act_order:
        return DenseFormat()
    sizes = sorted(GROUP_SIZES, reverse=True) if held_as.can_regroup else [held_as.group_size]
    for size in sizes:
        if size <= held_as.group_size and part.start % size == part.stop % size == 0:
            return replace(held_as, group_size=size)
    return None


def held_group_size(name: str, inputs: int, stored: int | None) -> int:
    """The size of groups in memory for weights stored in groups of `stored` inputs, None for one group.

    Larger groups are held as several of the same scale.
    Raises ConfigError: no size that Pagoda computes with divides the stored one, or that the inputs."""
    if stored is not None and inputs % stored:
        raise ConfigError(
            f"{name}.weight has {inputs} inputs, which groups of {stored} do not divide; "
            f"the number of inputs must be a multiple of the group size."
        )
    for size in sorted(GROUP_SIZES, reverse=True):
        if (stored or inputs) % size == 0:
            return size
    sizes = ", ".join(str(size) for size in GROUP_SIZES)
    what = f"{inputs} inputs in one group" if stored is None else f"groups of {stored} inputs"
    raise ConfigError(
        f"{name}.weight has {what}; Pagoda computes with groups of {sizes} or multiples of them."
    )
