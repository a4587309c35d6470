# SPDX-License-Identifier: Apache-2.0
"""Families of models that Pagoda runs: a module has those of one maker or kind, imported when a model needs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module

from pagoda.checkpoints.family import Family, GgufFormat


class _Families(Mapping[str, Family]):
    """Families by name; `modules` has the module of each."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._modules = modules

    def __getitem__(self, name: str) -> Family:
        module = import_module(f"{__name__}.{self._modules[name]}")
        known = (it for it in vars(module).values() if isinstance(it, Family))
        return next(family for family in known if family.architecture == name)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


FAMILIES: Mapping[str, Family] = _Families(
    {
        "LlamaForCausalLM": "llama",
        "Llama4ForCausalLM": "llama4",
        "CwmForCausalLM": "llama",
        "SmolLM3ForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "MinistralForCausalLM": "mistral",
        "Ministral3ForCausalLM": "mistral",
        "MixtralForCausalLM": "mistral",
        "Mistral4ForCausalLM": "mistral_latent",
        "MistralLarge3ForCausalLM": "mistral_latent",
        "Qwen2ForCausalLM": "qwen",
        "Qwen2MoeForCausalLM": "qwen",
        "MiMoForCausalLM": "qwen",
        "Qwen3ForCausalLM": "qwen",
        "Qwen3MoeForCausalLM": "qwen",
        "Qwen3VLMoeForConditionalGeneration": "qwen",
        "Phi3ForCausalLM": "llama",
        "GemmaForCausalLM": "gemma",
        "Gemma2ForCausalLM": "gemma",
        "Gemma3ForCausalLM": "gemma",
        "Gemma3nForCausalLM": "gemma3n",
        "Gemma4ForCausalLM": "gemma4",
        "GraniteForCausalLM": "granite",
        "GraniteMoeForCausalLM": "granite",
        "GraniteMoeHybridForCausalLM": "granite",
        "Mamba2ForCausalLM": "mamba",
        "BambaForCausalLM": "mamba",
        "MambaForCausalLM": "first_mamba",
        "FalconMambaForCausalLM": "first_mamba",
        "JambaForCausalLM": "first_mamba",
        "FalconH1ForCausalLM": "falcon_h1",
        "Zamba2ForCausalLM": "zamba2",
        "NemotronHForCausalLM": "nemotron_h",
        "OlmoForCausalLM": "olmo",
        "Olmo2ForCausalLM": "olmo",
        "Olmo3ForCausalLM": "olmo",
        "OlmoeForCausalLM": "olmo",
        "FlexOlmoForCausalLM": "olmo",
        "StableLmForCausalLM": "llama",
        "CohereForCausalLM": "cohere",
        "Cohere2ForCausalLM": "cohere",
        "GlmForCausalLM": "glm",
        "Glm4ForCausalLM": "glm",
        "Glm4MoeForCausalLM": "glm",
        "Glm4MoeLiteForCausalLM": "glm",
        "GlmMoeDsaForCausalLM": "glm",
        "DeepseekV2ForCausalLM": "deepseek",
        "DeepseekV3ForCausalLM": "deepseek",
        "DeepseekV32ForCausalLM": "deepseek",
        "GptOssForCausalLM": "gpt_oss",
        "Exaone4ForCausalLM": "llama",
        "SeedOssForCausalLM": "llama",
        "Lfm2ForCausalLM": "lfm2",
        "Lfm2MoeForCausalLM": "lfm2",
        "Qwen3NextForCausalLM": "qwen3_next",
        "Qwen3_5ForCausalLM": "qwen3_next",
        "Qwen3_5MoeForCausalLM": "qwen3_next",
        "KimiLinearForCausalLM": "kimi_linear",
        "PhiForCausalLM": "plain_mlps",
        "Starcoder2ForCausalLM": "plain_mlps",
        "NemotronForCausalLM": "plain_mlps",
        "ArceeForCausalLM": "plain_mlps",
        "Jais2ForCausalLM": "plain_mlps",
        "BitNetForCausalLM": "bitnet",
        "PersimmonForCausalLM": "plain_mlps",
        "ApertusForCausalLM": "plain_mlps",
        "Dots1ForCausalLM": "sigmoid_experts",
        "SolarOpenForCausalLM": "sigmoid_experts",
        "ExaoneMoeForCausalLM": "sigmoid_experts",
        "MiniMaxM2ForCausalLM": "sigmoid_experts",
        "MiniMaxForCausalLM": "minimax",
        "AfmoeForCausalLM": "sigmoid_experts",
        "MiMoV2FlashForCausalLM": "mimo",
        "Step3p5ForCausalLM": "step",
        "LongcatFlashForCausalLM": "longcat",
        "ArcticForCausalLM": "arctic",
        "PhimoeForCausalLM": "layer_norm_experts",
        "DbrxForCausalLM": "layer_norm_experts",
        "InternLMForCausalLM": "own_code",
        "InternLM2ForCausalLM": "own_code",
        "InternLM3ForCausalLM": "own_code",
        "ExaoneForCausalLM": "own_code",
        "OrionForCausalLM": "own_code",
        "MiniCPMForCausalLM": "own_code",
        "MiniCPM3ForCausalLM": "own_code",
        "TeleFLMForCausalLM": "own_code",
        "TeleChat2ForCausalLM": "own_code",
        "QWenLMHeadModel": "own_code",
        "BaichuanForCausalLM": "own_code",
        "ChatGLMForConditionalGeneration": "own_code",
        "DeepseekForCausalLM": "own_code",
        "BailingMoeForCausalLM": "own_code",
        "DeciLMForCausalLM": "deci",
        "SolarForCausalLM": "solar",
        "OuroForCausalLM": "ouro",
        "Plamo2ForCausalLM": "plamo",
        "Plamo3ForCausalLM": "plamo",
        "Ernie4_5ForCausalLM": "ernie",
        "Ernie4_5_MoeForCausalLM": "ernie",
        "HunYuanDenseV1ForCausalLM": "hunyuan",
        "HunYuanMoEV1ForCausalLM": "hunyuan",
        "WhisperForConditionalGeneration": "whisper",
        "T5ForConditionalGeneration": "t5",
        "MT5ForConditionalGeneration": "t5",
        "UMT5ForConditionalGeneration": "t5",
        "BartForConditionalGeneration": "bart",
        "MBartForConditionalGeneration": "bart",
        "PegasusForConditionalGeneration": "bart",
        "MarianMTModel": "bart",
        "GPT2LMHeadModel": "gpt",
        "GPTBigCodeForCausalLM": "gpt",
        "JAISLMHeadModel": "gpt",
        "GPTNeoXForCausalLM": "gpt",
        "GPTJForCausalLM": "gpt",
        "OPTForCausalLM": "gpt",
        "BloomForCausalLM": "bloom",
        "FalconForCausalLM": "bloom",
        "MptForCausalLM": "bloom",
        "BertModel": "bert",
        "BertForSequenceClassification": "bert",
        "XLMRobertaModel": "bert",
        "XLMRobertaForSequenceClassification": "bert",
        "DistilBertModel": "bert_kin",
        "ElectraModel": "bert_kin",
        "MPNetModel": "bert_kin",
        "DebertaV2Model": "bert_kin",
        "Gemma3TextModel": "gemma",
        "ModernBertModel": "rotary_encoders",
        "EuroBertModel": "rotary_encoders",
        "NomicBertModel": "rotary_encoders",
        "GteModel": "rotary_encoders",
        "JinaEmbeddingsV3Model": "rotary_encoders",
    }
)
"""Families by their names in `architectures` of config.json."""


@cache
def gguf_families() -> Mapping[str, list[tuple[Family, GgufFormat]]]:
    """Families by `general.architecture` of GGUF files, each with its form there."""
    found: dict[str, list[tuple[Family, GgufFormat]]] = {}
    for family in FAMILIES.values():
        for form in family.gguf_formats:
            found.setdefault(form.architecture, []).append((family, form))
    return found
