# SPDX-License-Identifier: Apache-2.0
"""Families of models that Pagoda runs: one file for each, and a line here."""

from __future__ import annotations

from pagoda.checkpoints.families.bert import BERT, BERT_RANKER, XLM_ROBERTA, XLM_ROBERTA_RANKER
from pagoda.checkpoints.families.cohere import COHERE, COHERE2
from pagoda.checkpoints.families.deepseek_v2 import DEEPSEEK_V2
from pagoda.checkpoints.families.deepseek_v3 import DEEPSEEK_V3
from pagoda.checkpoints.families.exaone4 import EXAONE4
from pagoda.checkpoints.families.gemma2 import GEMMA2
from pagoda.checkpoints.families.gemma3 import GEMMA3
from pagoda.checkpoints.families.glm4 import GLM, GLM4
from pagoda.checkpoints.families.glm4_moe import GLM4_MOE
from pagoda.checkpoints.families.glm4_moe_lite import GLM4_MOE_LITE
from pagoda.checkpoints.families.gpt_oss import GPT_OSS
from pagoda.checkpoints.families.granite import GRANITE
from pagoda.checkpoints.families.granite_moe import GRANITE4, GRANITE_MOE
from pagoda.checkpoints.families.lfm2 import LFM2
from pagoda.checkpoints.families.lfm2_moe import LFM2_MOE
from pagoda.checkpoints.families.llama import LLAMA
from pagoda.checkpoints.families.llama4 import LLAMA4
from pagoda.checkpoints.families.ministral import MINISTRAL
from pagoda.checkpoints.families.ministral3 import MINISTRAL3
from pagoda.checkpoints.families.mistral import MISTRAL
from pagoda.checkpoints.families.mixtral import MIXTRAL
from pagoda.checkpoints.families.olmo import OLMO2, OLMO3
from pagoda.checkpoints.families.olmoe import OLMOE
from pagoda.checkpoints.families.phi3 import PHI3
from pagoda.checkpoints.families.qwen2 import QWEN2
from pagoda.checkpoints.families.qwen2_moe import QWEN2_MOE
from pagoda.checkpoints.families.qwen3 import QWEN3
from pagoda.checkpoints.families.qwen3_5 import QWEN3_5
from pagoda.checkpoints.families.qwen3_5_moe import QWEN3_5_MOE
from pagoda.checkpoints.families.qwen3_moe import QWEN3_MOE
from pagoda.checkpoints.families.qwen3_next import QWEN3_NEXT
from pagoda.checkpoints.families.seed_oss import SEED_OSS
from pagoda.checkpoints.families.smollm3 import SMOLLM3
from pagoda.checkpoints.families.stablelm import STABLELM
from pagoda.checkpoints.family import Family

_ALL = (
    LLAMA,
    LLAMA4,
    SMOLLM3,
    MISTRAL,
    MINISTRAL,
    MINISTRAL3,
    MIXTRAL,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    PHI3,
    GEMMA2,
    GEMMA3,
    GRANITE,
    GRANITE_MOE,
    GRANITE4,
    OLMO2,
    OLMO3,
    OLMOE,
    STABLELM,
    COHERE,
    COHERE2,
    GLM,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT_OSS,
    EXAONE4,
    SEED_OSS,
    LFM2,
    LFM2_MOE,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    BERT,
    BERT_RANKER,
    XLM_ROBERTA,
    XLM_ROBERTA_RANKER,
)
FAMILIES: dict[str, Family] = {family.architecture: family for family in _ALL}
"""Families by their names in `architectures` of config.json."""
GGUF_FAMILIES: dict[str, list[Family]] = {}
"""Families by `general.architecture` of GGUF files."""
for _family in FAMILIES.values():
    if _family.gguf is not None:
        GGUF_FAMILIES.setdefault(_family.gguf.architecture, []).append(_family)
