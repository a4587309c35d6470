# SPDX-License-Identifier: Apache-2.0
"""Architectures that Pagoda knows and refuses, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Refusal(NamedTuple):
    """Reason why an architecture is not served."""

    reason: str
    """End of a sentence that says what the architecture does."""
    nearest: str
    """The family that is most like it."""


REFUSED: Mapping[str, Refusal] = {
    "Step3TextForCausalLM": Refusal("factorizes its queries", "Qwen3MoeForCausalLM"),
    "ArcticForCausalLM": Refusal("has experts beside dense layers", "MixtralForCausalLM"),
    "Grok1ModelForCausalLM": Refusal("has experts of GELU", "MixtralForCausalLM"),
    "RwkvForCausalLM": Refusal("has layers with a state of RWKV", "Lfm2ForCausalLM"),
}
"""Refusals by the names of architectures."""
