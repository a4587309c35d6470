# SPDX-License-Identifier: Apache-2.0
"""The oracle: SmolLM2 in transformers, its tokenizer as published, and texts to read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

TEXTS = Path(__file__).parent / "texts"
LANGUAGES = ("english", "code", "french", "chinese")


@dataclass(frozen=True)
class Oracle:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    directory: Path
    """The same weights in float32, as safetensors, with the tokenizer."""

    def ids(self, name: str) -> list[int]:
        """Token ids of one of the texts."""
        text = (TEXTS / f"{name}.txt").read_text(encoding="utf-8")
        return list(self.tokenizer(text)["input_ids"])

    def logits(self, ids: list[int], positions: list[int]) -> Tensor:
        """Logits [len(positions), vocabulary] in float32 behind the tokens at `positions`."""
        with torch.inference_mode():
            hidden = self.model.model(torch.tensor([ids])).last_hidden_state[0]
            return self.model.lm_head(hidden[positions])


def reference_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of transformers, with the splitting of SmolLM2's tokenizer.json.

    transformers drops that of GGUF files: digits stand alone (`Digits`) before words are cut (`ByteLevel`)."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


def all_ids(oracle: Oracle) -> list[int]:
    """Token ids of the licence and of all texts, one behind the other, the texts more than once."""
    licence = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    texts = [oracle.ids(name) for name in LANGUAGES]
    return [
        *oracle.tokenizer(licence)["input_ids"],
        *(i for _ in range(3) for text in texts for i in text),
    ]
