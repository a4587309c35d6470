# SPDX-License-Identifier: Apache-2.0
"""A model directory with random weights that Pagoda and other servers load alike, and the same weights as GGUF.

`python -m benchmarks.cpu.random_model DIRECTORY [--model qwen3-0.6b] [--gguf bf16 q8_0 q4_0]`
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch
from cyclopts import App, Parameter
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from pagoda.checkpoints.presets import PRESETS

WEIGHTS_FILE = "model.safetensors"
END_TOKEN = "<|im_end|>"
MERGE = ("Ġ", "Ġ")
"""The only one, of two blanks: a GGUF file cannot hold an empty list."""

GgufType = Literal["bf16", "q8_0", "q4_0"]

_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_app = App()


@_app.default
def main(
    directory: Path,
    *,
    model: Literal["qwen3-0.6b", "qwen3-4b", "qwen3-14b"] = "qwen3-0.6b",
    seed: int = 0,
    gguf: Annotated[tuple[GgufType, ...], Parameter(consume_multiple=True, negative=())] = (),
) -> None:
    """Writes the directory, unless it holds weights already, and the GGUF files in it.

    Args:
        directory: Where to.
        model: The shape.
        seed: Of the weights.
        gguf: Also write the same weights as MODEL-TYPE.gguf, in these types; needs the package gguf.
    """
    config = PRESETS[model]
    if not (directory / WEIGHTS_FILE).exists():
        write_model(directory, config, seed)
    for kind in gguf:
        from benchmarks.cpu.random_gguf import write_gguf

        path = directory / f"{model}-{kind}.gguf"
        if not path.exists():
            write_gguf(directory, config, path, kind)


def write_model(directory: Path, config: Mapping[str, object], seed: int) -> None:
    """Writes config.json, the tokenizer and the weights, these last: where they are, all is."""
    write_text_side(directory, config)
    save_file(
        dict(_weights(config, seed)),
        str(directory / WEIGHTS_FILE),
        metadata={"format": "pt"},
    )


def write_text_side(directory: Path, config: Mapping[str, object]) -> None:
    """Writes all but the weights, which a server makes up with `--load-format dummy`."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = _size(config, "vocab_size")
    ends = {"eos_token_id": vocab_size - 1}
    _write_json(directory / "config.json", {**config, "model_type": "qwen3", **ends})
    _write_json(directory / "generation_config.json", ends)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_TOKEN,
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": _TEMPLATE,
        },
    )
    _tokenizer(vocab_size).save(str(directory / "tokenizer.json"))


def vocabulary(size: int) -> list[str]:
    """The 256 bytes, their only merge, numbers up to `size`, and the end token.

    Numbers make every other token visible in a stream, whichever a random model draws.
    """
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "".join(MERGE)]
    return [*tokens, *(f"Ġ{number}" for number in range(len(tokens), size - 1)), END_TOKEN]


def _tokenizer(vocab_size: int) -> Tokenizer:
    *tokens, end = vocabulary(vocab_size)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [MERGE]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(end, special=True)])
    return tokenizer


def _weights(config: Mapping[str, object], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Norms are one; matrices have a standard deviation of 1 / sqrt(inputs), so activations keep their size."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in _shapes(config):
        if len(shape) == 1:
            yield name, torch.ones(shape, dtype=torch.bfloat16)
        else:
            weight = torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5)
            yield name, weight.bfloat16()


def _shapes(config: Mapping[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn = _size(config, "hidden_size"), _size(config, "intermediate_size")
    head_dim = _size(config, "head_dim")
    queries = _size(config, "num_attention_heads") * head_dim
    keys = _size(config, "num_key_value_heads") * head_dim
    yield "model.embed_tokens.weight", (_size(config, "vocab_size"), hidden)
    for layer in range(_size(config, "num_hidden_layers")):
        for name, shape in {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.q_norm": (head_dim,),
            "self_attn.k_norm": (head_dim,),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (_size(config, "vocab_size"), hidden)


def _size(config: Mapping[str, object], name: str) -> int:
    value = config[name]
    if not isinstance(value, int):
        raise TypeError(f"{name} is not a number: {value!r}")
    return value


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _app()
