# SPDX-License-Identifier: Apache-2.0
"""Tiny random models with heads that guess tokens, in the published layouts, and what these heads compute.

The heads are written here in plain torch, with the names of their makers: those of DeepSeek-V3 (DeepSeek-AI 2024,
part 2.2), GLM-4.5 and MiMo, whose layer is one of the family in transformers, and EAGLE-3 (Li et al. 2025).
Targets and heads say mostly what follows the last token alone, so that heads are right now and then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import family_models
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

MTP = ("deepseek-v3", "glm4-moe", "glm4-moe-lite", "mimo", "qwen3-next")
_WITH_STATES = ("qwen3-next",)
EAGLE = ("eagle3", "eagle3-speculators")
_DRAFT_VOCAB = 200
_HEADS = 4, 2, 16, 128
"""Heads of an EAGLE-3 head and those of K and V, their size, and that of the MLP."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size).normal_(1, 0.2))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self._eps).rsqrt()


class MtpHead(nn.Module):
    """In front of a layer of the model, and behind it."""

    def __init__(
        self,
        target: PreTrainedModel,
        layer: PreTrainedModel,
        *,
        hidden_first: bool,
        passes_normed: bool,
        offset: bool,
    ) -> None:
        """`offset`: norms of files are those of the definition less one."""
        super().__init__()
        size, eps = target.config.hidden_size, target.config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.shared_head_norm = RMSNorm(size, eps)
        self.layer, self.target, self._hidden_first = layer, target, hidden_first
        self._passes_normed = passes_normed
        layer.model.norm = nn.Identity()
        with torch.no_grad():
            self.eh_proj.weight.normal_(std=0.02)
            self.enorm.weight.copy_(1 + 0.1 * (self.enorm.weight - 1))
            self.shared_head_norm.weight.copy_(target.model.norm.weight + offset)
            of_embedding = slice(size, None) if hidden_first else slice(size)
            self.eh_proj.weight[:, of_embedding] += torch.eye(size)

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states [n, hidden] of the model for the head."""
        return self.target.model(ids[None]).last_hidden_state[0]

    def join(self, ids: Tensor, hidden: Tensor) -> Tensor:
        both = [self.enorm(self.target.model.embed_tokens(ids)), self.hnorm(hidden)]
        return self.eh_proj(torch.cat(both[:: -1 if self._hidden_first else 1], dim=-1))

    def rows(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [n, hidden] in front of the map to logits, and for the row behind."""
        x = self.layer.model(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]
        normed = self.shared_head_norm(x)
        return normed, normed if self._passes_normed else x

    def tokens(self, normed: Tensor) -> Tensor:
        return self.target.lm_head(normed).argmax(-1)


class EagleHead(nn.Module):
    def __init__(
        self, target: PreTrainedModel, *, layers: Sequence[int], adds_normed: bool, embeds: bool
    ) -> None:
        super().__init__()
        heads, kv, dim, inner, eps = *_HEADS, 1e-6
        size, vocab = target.config.hidden_size, target.config.vocab_size
        self.target, self._layers, self._adds_normed = target, layers, adds_normed
        self._shape = heads, kv, dim
        sizes = {
            "fc": (3 * size, size),
            "q_proj": (2 * size, heads * dim),
            "k_proj": (2 * size, kv * dim),
            "v_proj": (2 * size, kv * dim),
            "o_proj": (heads * dim, size),
            "gate_proj": (size, inner),
            "up_proj": (size, inner),
            "down_proj": (inner, size),
        }
        self.maps = nn.ModuleDict({it: nn.Linear(*size, bias=False) for it, size in sizes.items()})
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        self.norms = nn.ModuleDict({it: RMSNorm(size, eps) for it in names})
        self.lm_head = nn.Linear(size, _DRAFT_VOCAB, bias=False)
        self.embed_tokens = nn.Embedding(vocab, size) if embeds else target.model.embed_tokens
        self.has_embedding = embeds
        said = torch.cat([torch.arange(20), 20 + torch.randperm(vocab - 20)[: _DRAFT_VOCAB - 20]])
        said = said.sort().values
        self.d2t = said - torch.arange(_DRAFT_VOCAB)
        with torch.no_grad():
            for name, it in self.maps.items():
                it.weight.normal_(std=0.002 if name in ("o_proj", "down_proj") else 0.2)
            self.maps["fc"].weight.mul_(0.1).add_(torch.eye(size).repeat(1, 3) / 3)
            self.lm_head.weight.copy_(target.lm_head.weight[said])

    def hidden(self, ids: Tensor) -> Tensor:
        found = self.target.model(ids[None], output_hidden_states=True).hidden_states
        return self.maps["fc"](torch.cat([found[layer][0] for layer in self._layers], dim=-1))

    def join(self, ids: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat([self.norms["input_layernorm"](self.embed_tokens(ids)), hidden], dim=-1)

    def rows(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        embedded, hidden = joined.split(joined.shape[-1] // 2, dim=-1)
        normed = self.norms["hidden_norm"](hidden)
        x = normed if self._adds_normed else hidden
        x = x + self._attention(torch.cat([embedded, normed], dim=-1))
        h = self.norms["post_attention_layernorm"](x)
        gated = functional.silu(self.maps["gate_proj"](h)) * self.maps["up_proj"](h)
        x = x + self.maps["down_proj"](gated)
        return self.norms["norm"](x), x

    def _attention(self, x: Tensor) -> Tensor:
        heads, kv, dim = self._shape
        positions = torch.arange(len(x))
        angles = positions[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def turned(name: str, count: int) -> Tensor:
            each = self.maps[name](x).view(len(x), count, dim).transpose(0, 1)
            half = torch.cat([-each[..., dim // 2 :], each[..., : dim // 2]], dim=-1)
            return each * cos + half * sin

        q, k = turned("q_proj", heads), turned("k_proj", kv).repeat_interleave(heads // kv, 0)
        v = self.maps["v_proj"](x).view(len(x), kv, dim).transpose(0, 1)
        v = v.repeat_interleave(heads // kv, 0)
        out = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
        return self.maps["o_proj"](out[0].transpose(0, 1).reshape(len(x), heads * dim))

    def tokens(self, normed: Tensor) -> Tensor:
        found = self.lm_head(normed).argmax(-1)
        return found + self.d2t[found]


@dataclass(frozen=True)
class HeadModel:
    """A saved model, and its head."""

    directory: Path
    target: PreTrainedModel
    head: MtpHead | EagleHead
    drafter: Path | None
    """Directory of a head that is not the model's own."""
    num_parameters: int
    """Numbers that the head has, and its model does not."""
    tensors: Mapping[str, Tensor]
    """Those that are behind the model's, by their names."""

    @torch.no_grad()
    def answer(self, known: Sequence[int], count: int) -> list[int]:
        """What the model says greedily behind tokens."""
        ids = list(known)
        for _ in range(count):
            ids.append(int(self.target(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(known) :]

    @torch.no_grad()
    def drafts(self, known: Sequence[int], count: int) -> tuple[list[int], list[Tensor]]:
        """What the head drafts behind tokens, and the hidden state [hidden] in front of each draft's logits."""
        ids, head = torch.tensor(known), self.head
        joined = head.join(ids[1:], head.hidden(ids[:-1]))
        drafts, states = list[int](), list[Tensor]()
        while len(drafts) < count:
            normed, passed = head.rows(joined)
            states.append(normed[-1])
            drafts.append(int(head.tokens(normed[-1])))
            row = head.join(torch.tensor([drafts[-1]]), passed[-1:])
            joined = torch.cat([joined, row])
        return drafts, states


def calm(model: PreTrainedModel) -> None:
    """What layers add becomes small, so that a token depends most on the one in front of it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight")) or "down_proj" in name:
                parameter.mul_(0.01)


def save_head_model(kind: str, directory: Path) -> HeadModel:
    """A model with a head of its own (`MTP`), or one of a directory beside it (`EAGLE`)."""
    torch.manual_seed(3)
    make, name, sizes = _maker(kind)
    target = make(name, **sizes)
    calm(target)
    if kind in EAGLE:  # it says the last token again, which hidden states tell
        target.lm_head.weight.data.copy_(target.model.embed_tokens.weight)
    path = directory / "target"
    target.save_pretrained(path)
    if kind in EAGLE:
        layers = (2, 2, 2) if kind == "eagle3" else (0, 1, 4)
        own = directory / "head"
        eagle, number = save_eagle_head(kind, own, target, layers)
        return HeadModel(path, target, eagle, own, number, {})
    layer = make(name, **sizes, **layer_alone(kind))
    head, tensors, changes = make_mtp_head(kind, target, layer, directory / "layer")
    add_tensors(path, tensors)
    change_config(path, changes)
    shared = ("embed_tokens.weight", "shared_head.head.weight")
    number = sum(it.numel() for name, it in tensors.items() if not name.endswith(shared))
    return HeadModel(path, target, head, None, number, tensors)


def make_mtp_head(
    kind: str, target: PreTrainedModel, layer: PreTrainedModel, directory: Path
) -> tuple[MtpHead, dict[str, Tensor], dict[str, Any]]:
    """The head with a `layer`, a model of one that is saved in `directory`; its tensors by their names in files of
    `target`, and what config.json says of it."""
    calm(layer)
    offset = kind in _WITH_STATES
    head = MtpHead(
        target,
        layer,
        hidden_first=kind == "mimo",
        passes_normed=kind == "mimo" or offset,
        offset=offset,
    )
    layer.save_pretrained(directory)
    saved = load_file(directory / "model.safetensors")
    at, layer_at = f"model.layers.{target.config.num_hidden_layers}", ""
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    if offset:
        at, layer_at = "mtp", "mtp.layers.0"
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    elif kind == "mimo":
        at = "model.mtp_layers.0"
        names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    own = (head.enorm, head.hnorm, head.eh_proj, head.shared_head_norm)
    tensors = {
        f"{at}.{name}.weight": it.weight - offset * (it is not head.eh_proj)
        for name, it in zip(names, own, strict=True)
    }
    tensors |= {
        name.replace("model.layers.0", layer_at or at): tensor
        for name, tensor in saved.items()
        if name.startswith("model.layers.0.")
    }
    changes: dict[str, Any] = {} if offset else {"num_nextn_predict_layers": 1}
    if kind == "mimo":
        changes["architectures"] = ["MiMoForCausalLM"]
    elif not offset:
        tensors[f"{at}.embed_tokens.weight"] = target.model.embed_tokens.weight
        tensors[f"{at}.shared_head.head.weight"] = target.lm_head.weight
    return head, {name: it.detach().clone() for name, it in tensors.items()}, changes


def _maker(kind: str) -> tuple[Callable[..., PreTrainedModel], str, dict[str, Any]]:
    if kind == "mimo":
        return tiny_models.make_model, "qwen2", {"hidden_size": 64, "num_attention_heads": 4}
    if kind in EAGLE:
        name = {"eagle3": "qwen3", "eagle3-speculators": "llama"}[kind]
        return tiny_models.make_model, name, {"num_hidden_layers": 5}
    return family_models.make_model, kind, {}


def layer_alone(kind: str) -> dict[str, Any]:
    """Values of a configuration with one layer, which has experts as the model's last one."""
    if kind in _WITH_STATES:
        return {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    if kind == "glm4-moe-lite":
        return {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]}
    return {"num_hidden_layers": 1} | ({} if kind == "mimo" else {"first_k_dense_replace": 0})


def save_eagle_head(
    kind: str, directory: Path, target: PreTrainedModel, layers: Sequence[int]
) -> tuple[EagleHead, int]:
    """Saves a head that takes inputs of these layers; returns it, and how many numbers it has."""
    plain = kind == "eagle3"
    head = EagleHead(target, layers=layers, adds_normed=not plain, embeds=not plain)
    layer = "midlayer" if plain else "layers.0"
    parts = {"o_proj": "self_attn.", "gate_proj": "mlp.", "up_proj": "mlp.", "down_proj": "mlp."}
    parts |= dict.fromkeys(("q_proj", "k_proj", "v_proj"), "self_attn.")
    tensors = {
        "fc.weight" if name == "fc" else f"{layer}.{parts[name]}{name}.weight": it.weight
        for name, it in head.maps.items()
    }
    tensors |= {
        "norm.weight" if name == "norm" else f"{layer}.{name}.weight": it.weight
        for name, it in head.norms.items()
    }
    said = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    said[torch.arange(_DRAFT_VOCAB) + head.d2t] = True
    tensors |= {"lm_head.weight": head.lm_head.weight, "d2t": head.d2t, "t2d": said}
    if head.has_embedding:
        tensors["embed_tokens.weight"] = head.embed_tokens.weight
    directory.mkdir()
    stored = {name: it.detach().contiguous() for name, it in tensors.items()}
    save_file(stored, directory / "model.safetensors")
    heads, kv, dim, inner = _HEADS
    sizes: dict[str, Any] = {
        **{
            "hidden_size": target.config.hidden_size,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "head_dim": dim,
        },
        **{
            "num_key_value_heads": kv,
            "rms_norm_eps": 1e-6,
            "vocab_size": target.config.vocab_size,
            "hidden_act": "silu",
        },
        **{"rope_theta": 10_000.0, "max_position_embeddings": 64, "torch_dtype": "float32"},
    }
    config: dict[str, Any] = {"draft_vocab_size": _DRAFT_VOCAB}
    if plain:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, **sizes}
    else:
        config |= {
            "architectures": ["Eagle3Speculator"],
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": list(layers),
            "transformer_layer_config": sizes,
        }
    (directory / "config.json").write_text(json.dumps(config))
    number = sum(it.numel() for name, it in tensors.items() if name not in ("d2t", "t2d"))
    return head, number


def add_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    file = path / "model.safetensors"
    kept = load_file(file)
    added = {name: it.detach().clone().contiguous() for name, it in tensors.items()}
    save_file(kept | added, file, metadata={"format": "pt"})


def change_config(path: Path, changes: dict[str, Any]) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
