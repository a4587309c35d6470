# SPDX-License-Identifier: Apache-2.0
"""Models that transformers has no class for: others of its classes, with modules that compute as makers' do."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel


class Jais(transformers.BloomForCausalLM):
    """BLOOM with gated MLPs, scores over the size of heads, and no norm of embeddings."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.transformer.word_embeddings_layernorm = nn.Identity()
        for block in self.transformer.h:
            block.mlp = _GatedMlp(config.hidden_size, 96)
            block.self_attention.inv_norm_factor = 1 / block.self_attention.head_dim


class _GatedMlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.c_fc, self.c_fc2 = nn.Linear(hidden, inner), nn.Linear(hidden, inner)
        self.c_proj = nn.Linear(inner, hidden)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self.c_proj(self.c_fc(x) * torch.nn.functional.silu(self.c_fc2(x)))


class Plamo2(transformers.Gemma3ForCausalLM):
    """Gemma 3 with Mamba of heads, or attention whose heads have weights of norms, in place of its attention."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.config.use_cache = self.generation_config.use_cache = False
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = _Attention() if index % 2 else _Scan()


def _varied(*shape: int) -> nn.Parameter:
    return nn.Parameter(1 + 0.2 * torch.randn(*shape))


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


class _Scan(nn.Module):
    """Mamba of 4 heads of 16 channels with states of 5, token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = (nn.Linear(64, size, bias=False) for size in (128, 64))
        self.conv1d = nn.Conv1d(64, 64, 3, groups=64, padding=2, bias=False)
        self.bcdt_proj = nn.Linear(64, 2 * 5 + 64, bias=False)
        self.dt_proj = nn.Linear(64, 4, bias=False)
        self.dt_bias, self.A_log, self.D = _varied(4), nn.Parameter(torch.randn(4)), _varied(4)
        self.dt_scale, self.B_scale, self.C_scale = _varied(64), _varied(5), _varied(5)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        batch, count, _hidden = hidden_states.shape
        z, x = self.in_proj(hidden_states).view(batch, count, 4, 32).split(16, dim=-1)
        x = self.conv1d(x.flatten(2).transpose(1, 2))[..., :count].transpose(1, 2)
        x = nn.functional.silu(x)
        b, c, dt = self.bcdt_proj(x).split([5, 5, 64], dim=-1)
        b, c = _normed(b, self.B_scale), _normed(c, self.C_scale)
        step = nn.functional.softplus(self.dt_proj(_normed(dt, self.dt_scale)) + self.dt_bias)
        kept, x = torch.exp(-step * self.A_log.exp()), x.view(batch, count, 4, 16)
        state, out = x.new_zeros(batch, 4, 16, 5), []
        for t in range(count):
            added = (step[:, t, :, None] * x[:, t])[..., None] * b[:, t, None, None]
            state = state * kept[:, t, :, None, None] + added
            out.append((state * c[:, t, None, None]).sum(-1) + self.D[:, None] * x[:, t])
        gated = torch.stack(out, 1) * nn.functional.silu(z)
        return self.out_proj(gated.flatten(2)), None


class _Attention(nn.Module):
    """Attention of 4 heads of 16, of which two have keys and values in common."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = (nn.Linear(64, size, bias=False) for size in (128, 64))
        self.q_weight, self.k_weight = _varied(4, 16), _varied(2, 16)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        batch, count, _hidden = hidden_states.shape
        heads = self.qkv_proj(hidden_states).view(batch, count, 8, 16)
        q, k, v = heads.split([4, 2, 2], dim=2)
        places = torch.arange(count, dtype=q.dtype)
        angles = places[:, None] * 10_000.0 ** (-torch.arange(8, dtype=q.dtype) / 8)
        turned = []
        for part, weight in ((q, self.q_weight), (k, self.k_weight)):
            first, second = _normed(part, weight).chunk(2, dim=-1)
            cos, sin = angles.cos()[:, None], angles.sin()[:, None]
            turned.append(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))
        q, k, v = (it.transpose(1, 2) for it in (*turned, v))
        k, v = (it.repeat_interleave(2, dim=1) for it in (k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=count > 1)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class Ouro(transformers.Gemma2ForCausalLM):
    """Gemma 2 whose second half of layers is the first one again, behind the norm of its outputs."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.config.use_cache = self.generation_config.use_cache = False
        layers = [*self.model.layers][: config.num_hidden_layers // 2]
        again = [_Again(layer, None if at else self.model.norm) for at, layer in enumerate(layers)]
        self.model.layers = nn.ModuleList([*layers, *again])


class _Again(nn.Module):
    """A layer that another module owns, and maybe a norm in front of it."""

    def __init__(self, layer: nn.Module, norm: nn.Module | None) -> None:
        super().__init__()
        self.__dict__["others"] = layer, norm  # so that their weights are saved once

    def forward(self, hidden_states: Tensor, *rest: Any, **named: Any) -> Any:
        layer, norm = self.__dict__["others"]
        return layer(hidden_states if norm is None else norm(hidden_states), *rest, **named)


DECI_BLOCKS: list[dict[str, dict[str, Any]]] = [
    {"attention": {"n_heads_in_group": 2}, "ffn": {"intermediate_size": 96}},
    {"attention": {"no_op": True}, "ffn": {"intermediate_size": 64}},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
    {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 3.0}},
    {"attention": {"n_heads_in_group": 1}, "ffn": {"intermediate_size": 96}},
    {"attention": {"no_op": True}, "ffn": {"no_op": True}},
]


class Deci(transformers.LlamaForCausalLM):
    """Llama whose layers are those of `DECI_BLOCKS`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.config.use_cache = self.generation_config.use_cache = False
        for index, (layer, block) in enumerate(zip(self.model.layers, DECI_BLOCKS, strict=True)):
            own, attention, ffn = copy.copy(config), block["attention"], block["ffn"]
            if attention.get("no_op"):
                layer.self_attn = _Instead(None)
            elif attention.get("replace_with_linear"):
                layer.self_attn = _Instead(nn.Linear(64, 64, bias=False))
            else:
                own.num_key_value_heads = 4 // attention["n_heads_in_group"]
                layer.self_attn = LlamaAttention(own, index)
            own.intermediate_size = ffn.get("intermediate_size", 256)
            layer.mlp = _Zero() if ffn.get("no_op") else LlamaMLP(own)


class _Instead(nn.Module):
    """A map in the place of attention, or nothing."""

    def __init__(self, linear: nn.Module | None) -> None:
        super().__init__()
        self.linear_attn = linear

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        if self.linear_attn is None:
            return torch.zeros_like(hidden_states), None
        return self.linear_attn(hidden_states), None


class _Zero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


SOLAR_LISTS: dict[str, Any] = {
    **{"bskcn_1": [1, 3], "bskcn_2": [2], "bskcn_3": [2, 4], "bskcn_4": [4]},
    "bskcn_tv": [0.9, 0.7],
}


class Solar(transformers.LlamaForCausalLM):
    """Llama some of whose layers are given a mix with what others in front were given, by `SOLAR_LISTS`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        kept: dict[str, Tensor] = {}
        for index, layer in enumerate(self.model.layers):
            layer.register_forward_pre_hook(partial(_mix, kept, index))


def _mix(kept: dict[str, Tensor], index: int, _: nn.Module, given: tuple[Any, ...]) -> Any:
    """Keeps, and mixes, the input of a layer."""
    hidden, share = given[0], SOLAR_LISTS["bskcn_tv"][1]
    for name in ("bskcn_1", "bskcn_2"):
        if index in SOLAR_LISTS[name]:
            kept[name] = hidden
    for name, source in (("bskcn_3", "bskcn_1"), ("bskcn_4", "bskcn_2")):
        if index in SOLAR_LISTS[name]:
            hidden = kept[source] * share + hidden * (1 - share)
    return (hidden, *given[1:])


class Step(Step3p7PreTrainedModel, transformers.GenerationMixin):
    """The decoder of Step 3.7 with a head, which transformers has within a model that sees alone."""

    config_class = Step3p7TextConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        self.generation_config.pad_token_id = None  # the configuration must have one

    def forward(self, input_ids: Tensor, **named: Any) -> CausalLMOutputWithPast:
        named.pop("logits_to_keep", None)
        found = self.model(input_ids=input_ids, **named)
        logits = self.lm_head(found[0])
        return CausalLMOutputWithPast(logits=logits, past_key_values=found.cache)


class Arctic(transformers.MixtralForCausalLM):
    """Mixtral whose even layers are dense, and whose others have a dense MLP behind attention besides experts."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        count = config.num_hidden_layers
        self.model.layers = nn.ModuleList([_ArcticLayer(config, it) for it in range(count)])
        self.model.layers.apply(self._init_weights)


class _ArcticLayer(MixtralDecoderLayer):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        dense = copy.copy(config)
        dense.mlp_bias = False
        if index % 2 == 0:
            self.mlp = LlamaMLP(dense)
            return
        dense.intermediate_size = config.hidden_size
        self.residual_mlp = LlamaMLP(dense)
        self.residual_layernorm = copy.deepcopy(self.input_layernorm)

    def forward(self, hidden_states: Tensor, **named: Any) -> Tensor:
        x, normed = hidden_states, self.input_layernorm(hidden_states)
        behind = x + self.self_attn(hidden_states=normed, **named)[0]
        if isinstance(self.mlp, LlamaMLP):
            return behind + self.mlp(self.post_attention_layernorm(behind))
        dense = self.residual_mlp(self.residual_layernorm(behind))
        return behind + dense + self.mlp(self.post_attention_layernorm(x))
