# SPDX-License-Identifier: Apache-2.0
"""Number formats of K and V, a row for each. `Capabilities.kv_cache_dtypes` says which of them a backend keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KVDtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3"]
"""Values of --kv-cache-dtype: the names of rows, and other names of them."""
OTHER_NAMES = {"fp8_e4m3": "fp8"}
SCALE_BYTES = 4


@dataclass(frozen=True)
class KVFormat:
    name: str
    dtype: str
    """The name that torch has for it."""
    element_bytes: int
    has_scales: bool = False
    """True if each vector, a head's K or V of a token, has a scale in float32."""

    def vector_bytes(self, elements: int) -> int:
        """Bytes of a vector of so many elements."""
        return elements * self.element_bytes + SCALE_BYTES * self.has_scales


KV_FORMATS = {
    row.name: row
    for row in (
        KVFormat("float32", "float32", 4),
        KVFormat("bfloat16", "bfloat16", 2),
        KVFormat("float16", "float16", 2),
        KVFormat("int8", "int8", 1, has_scales=True),
        KVFormat("fp8", "float8_e4m3fn", 1),
    )
}
_BY_DTYPE = {row.dtype: row for row in KV_FORMATS.values()}


def format_of(dtype: object) -> KVFormat:
    """The format of a torch dtype. Raises KeyError: K and V are not kept in it."""
    return _BY_DTYPE[str(dtype).removeprefix("torch.")]
