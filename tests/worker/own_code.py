# SPDX-License-Identifier: Apache-2.0
"""Family whose makers publish code of their own, by a class that computes the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import transformers
from torch import Tensor

Tensors = dict[str, Tensor]


class OwnCode(NamedTuple):
    """A family by a class of transformers that computes the same."""

    architecture: str
    like: str | type[transformers.PreTrainedModel]
    """The class, or its name."""
    values: Mapping[str, Any]
    """Values of its configuration."""
    renamed: Mapping[str, str] = {}
    """Parts of names of tensors with those that files have."""
    fields: Mapping[str, str] = {}
    """Fields of config.json with those that files have."""
    more: Mapping[str, Any] = {}
    """Fields that files have besides."""
    change: Callable[[Tensors, Any], None] = lambda *_: None
    """Changes the tensors that files hold in another way, by their renamed names."""
