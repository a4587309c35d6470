# SPDX-License-Identifier: Apache-2.0
"""Linear maps as a checkpoint gave them, kept on the host until they are staged for the chips."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagoda.backend.base import UnsupportedError
from pagoda.backend.weights import DenseWeight, LinearWeight


class HostLinear:
    """Linear maps of the same inputs, whose outputs follow one another."""

    def __init__(self, values: Tensor) -> None:
        """`values` [out, in] are of the dtype that the programs compute with."""
        self.outputs, self.inputs = values.shape
        self.dtype = values.dtype
        self._values: Tensor | None = values

    @property
    def values(self) -> Tensor:
        """The maps, [out, in]. Raises RuntimeError: they are on the chips, and no more here."""
        if self._values is None:
            raise RuntimeError("These weights have been given back; load the model anew.")
        return self._values

    def release(self) -> None:
        """Gives the host's memory back."""
        self._values = None


def prepare_linear(
    parts: Sequence[LinearWeight],
    bias: Tensor | None,
    dtype: torch.dtype,
    known: Sequence[torch.dtype],
) -> HostLinear:
    """Maps in one of the dtypes that programs compute with.

    Raises UnsupportedError: a map is quantized, has a bias, or is of another dtype.
    """
    dense = [part.values for part in parts if isinstance(part, DenseWeight)]
    if len(dense) < len(parts):
        raise UnsupportedError("the PyPTO programs take no quantized weights.")
    if bias is not None:
        raise UnsupportedError("the PyPTO programs take no linear maps with a bias.")
    for wanted in (dtype, *(values.dtype for values in dense)):
        if wanted not in known:
            raise UnsupportedError(f"the PyPTO programs take no weights of {wanted}.")
    return HostLinear(torch.cat([values.to(dtype) for values in dense]))
