# SPDX-License-Identifier: Apache-2.0
"""Texts that an encoder embeds in a second, beside transformers: the same random weights and texts, in turn.

`python -m benchmarks.cpu.pooling [--texts 512] [--layers 6] [--hidden 384] [--dtype bfloat16]`: mixed lengths,
a few long. transformers gets batches of texts sorted by length, with padding, as sentence-transformers has it.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from cyclopts import App, Parameter
from tokenizers import Tokenizer, models, pre_tokenizers

from pagoda.cli import output
from pagoda.llm.llm import LLM
from pagoda.messages.frontend import Pooling
from pagoda.text.embeddings import EmbeddingOptions

_VOCAB_SIZE = 30522
_app = App()


@_app.default
def main(
    *,
    texts: int = 512,
    layers: int = 6,
    hidden: int = 384,
    batch: int = 32,
    rounds: int = 3,
    dtype: Annotated[
        tuple[Literal["float32", "bfloat16"], ...], Parameter(consume_multiple=True)
    ] = (
        "float32",
        "bfloat16",
    ),
) -> None:
    """Prints texts and tokens a second of both.

    Args:
        texts: Their number.
        layers: Layers of the encoder; the default shape is that of all-MiniLM-L6 and BGE small.
        hidden: Its channels.
        batch: Texts of a batch of transformers.
        rounds: Measurements of each, of which the median counts.
        dtype: Number formats.
    """
    prompts = _prompts(texts)
    num_tokens = sum(map(len, prompts))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = _write(directory, layers, hidden)
        rows = [_row(directory, model, prompts, num_tokens, batch, rounds, one) for one in dtype]
    title = f"{texts} texts, {num_tokens} tokens, {layers} layers of {hidden}"
    heads = ("dtype", "transformers, texts/s", "Pagoda, texts/s", "ratio", "least cosine")
    output.stdout().print(output.table(title, heads, rows))


def _prompts(count: int) -> list[list[int]]:
    """Token ids of texts: most are a sentence or a paragraph, one in sixteen is near 500 tokens."""
    rng = random.Random(0)
    lengths = [
        rng.randint(400, 500)
        if index % 16 == 0
        else min(500, int(rng.lognormvariate(3.6, 0.8)) + 4)
        for index in range(count)
    ]
    rng.shuffle(lengths)
    return [[rng.randrange(1000, _VOCAB_SIZE) for _ in range(length)] for length in lengths]


def _write(directory: Path, layers: int, hidden: int) -> Any:
    """A random BERT in a directory, with a tokenizer that nothing asks."""
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=hidden // 32,
    )
    torch.manual_seed(0)
    model: Any = transformers.BertModel(config, add_pooling_layer=False)
    model.eval()
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return model


def _row(
    directory: Path,
    model: Any,
    prompts: list[list[int]],
    num_tokens: int,
    batch: int,
    rounds: int,
    dtype: str,
) -> tuple[str, ...]:
    model = model.to(getattr(torch, dtype))
    options = EmbeddingOptions(pooling=Pooling.MEAN, normalize=True)
    theirs, ours = [], []
    with LLM(str(directory), dtype=dtype) as llm:
        llm.embed(prompts[:32], options)
        for _ in range(rounds):  # in turn, as the machine drifts
            expected, seconds = _timed(lambda: _embed(model, prompts, batch))
            theirs.append(seconds)
            found, seconds = _timed(lambda: llm.embed(prompts, options))
            ours.append(seconds)
    vectors = torch.tensor([one.embedding for one in found])
    cosine = (vectors * expected).sum(1).min().item()
    one, other = statistics.median(theirs), statistics.median(ours)
    return (
        dtype,
        f"{len(prompts) / one:.0f} ({num_tokens / one:,.0f} tokens/s)",
        f"{len(prompts) / other:.0f} ({num_tokens / other:,.0f} tokens/s)",
        f"{one / other:.2f}",
        f"{cosine:.5f}",
    )


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


@torch.inference_mode()
def _embed(model: Any, prompts: list[list[int]], batch: int) -> torch.Tensor:
    """Means of hidden states, of length 1, in the order of the prompts."""
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    vectors = torch.empty(len(prompts), model.config.hidden_size)
    for begin in range(0, len(order), batch):
        some = order[begin : begin + batch]
        lengths = torch.tensor([len(prompts[index]) for index in some])
        ids = torch.zeros(len(some), int(lengths.max()), dtype=torch.int64)
        for row, index in enumerate(some):
            ids[row, : lengths[row]] = torch.tensor(prompts[index])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        states = model(ids, attention_mask=mask.long()).last_hidden_state.float()
        means = (states * mask[..., None]).sum(1) / lengths[:, None]
        vectors[some] = torch.nn.functional.normalize(means, dim=1)
    return vectors


if __name__ == "__main__":
    _app()
