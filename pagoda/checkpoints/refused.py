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


_RWKV = Refusal("has layers with a state of RWKV", "Lfm2ForCausalLM")
REFUSED: Mapping[str, Refusal] = {
    "Step3TextForCausalLM": Refusal("factorizes its queries", "Qwen3MoeForCausalLM"),
    "Grok1ModelForCausalLM": Refusal("has experts of GELU", "MixtralForCausalLM"),
    "RwkvForCausalLM": _RWKV,
    "RWKV7ForCausalLM": _RWKV,
    "PanguProMoEV2ForCausalLM": Refusal(
        "has keys and values that are weights", "GptOssForCausalLM"
    ),
    "PanguUltraMoEForCausalLM": Refusal(
        "rotates heads in an order on which programs do not agree", "DeepseekV3ForCausalLM"
    ),
}
"""Refusals by the names of architectures."""
