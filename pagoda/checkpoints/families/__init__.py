"""Families of models that Pagoda runs: one file for each, and a line here."""

from __future__ import annotations

from pagoda.checkpoints.families.llama import LLAMA
from pagoda.checkpoints.families.mistral import MISTRAL
from pagoda.checkpoints.families.mixtral import MIXTRAL
from pagoda.checkpoints.families.qwen2 import QWEN2
from pagoda.checkpoints.families.qwen3 import QWEN3
from pagoda.checkpoints.families.qwen3_moe import QWEN3_MOE
from pagoda.checkpoints.model_config import Family

FAMILIES: dict[str, Family] = {
    family.architecture: family for family in (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE)
}
"""Families by their names in `architectures` of config.json."""
GGUF_FAMILIES: dict[tuple[str, bool], Family] = {
    (family.gguf.architecture, family.gguf.windowed): family
    for family in FAMILIES.values()
    if family.gguf is not None
}
"""Families by `general.architecture` of GGUF files, and by whether a file has a sliding window."""
