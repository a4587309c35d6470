# SPDX-License-Identifier: Apache-2.0
"""A model as `pagoda doctor` sees it: whether it can be served, and what it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pagoda.checkpoints.checkpoint_quantization import CheckpointQuantization, is_dense_once_loaded
from pagoda.checkpoints.contents import missing_tensor, no_place, tensor_names, unread_tensors
from pagoda.checkpoints.gguf.reader import read_gguf
from pagoda.checkpoints.layer_spec import ExpertsSpec, LayerSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.resolve import ModelFiles
from pagoda.cli.weight_traffic import BYTES_PER_WEIGHT, held_bytes
from pagoda.engine.drafting.matching import INDEX_BYTES, MOST_POOL_BYTES
from pagoda.errors import ConfigError
from pagoda.ipc.machine import format_bytes
from pagoda.messages.kv_groups import KVKind, layer_groups

_BLOCK_SIZE = 16
"""Tokens of a block, as servers have it unless told otherwise."""
_ENCODED_MULTIPLE = 128
"""Tokens of which blocks with room for what is heard are a multiple."""
_LONG_CONTEXT = 32_768
_KV_BYTES = 2
"""Bytes of a number in a cache of 16 bits."""
_STREAMED = (KVKind.FULL, KVKind.LATENT)
"""Kinds of layers whose KV may lie below the device while a request runs."""
_PART_OF_CONTEXT = 10_000
_DISK_BYTES_PER_S = 1e9
"""Bandwidth of an SSD, at least, which is not measured here."""
CONTEXT_COLUMNS = (
    "storey",
    "free",
    "tokens in 16 bits",
    f"each token, for {_PART_OF_CONTEXT:,} tokens there",
)


def check_tensors(files: ModelFiles, spec: ModelSpec) -> None:
    """Raises ConfigError: a tensor is missing in the files of a model or has no place there, or a file is
    damaged."""
    if files.gguf is not None:
        file = read_gguf(files.gguf)
        missing, where = missing_tensor(spec, file.tensors), files.gguf
    elif files.directory is not None:
        names, where = tensor_names(files.directory), files.directory
        missing = missing_tensor(spec, names)
        for name in unread_tensors(spec, names):
            if not name.endswith(
                "bias"
            ):  # one of zeros is no fault, as a worker sees when it reads it
                raise no_place(name, where, spec)
    else:
        return
    if missing is not None:
        raise ConfigError(
            f"{where} lacks the tensor {missing}, which a model of {spec.family.architecture} needs; fetch it "
            "again, or convert it anew."
        )


def check_memory(spec: ModelSpec, dtype: str, quantization: str, free_bytes: int) -> None:
    """Raises ConfigError: the weights are larger than the free memory."""
    needed = held_bytes(spec, dtype, quantization)
    if needed <= free_bytes:
        return
    smaller = [
        f"--quantization {name} takes {format_bytes(held_bytes(spec, dtype, name))}"
        for name in ("int8", "int4")
        if may_be_quantized(spec) and held_bytes(spec, dtype, name) < min(needed, free_bytes)
    ]
    others = "; ".join(smaller) or "split it over several hosts (--pipeline-parallel-size)"
    raise ConfigError(
        f"its weights take {format_bytes(needed)}, but only {format_bytes(free_bytes)} are free; {others}."
    )


def may_be_quantized(spec: ModelSpec) -> bool:
    """True if weights may be rounded as they are loaded."""
    return is_dense_once_loaded(spec.quantization)


def model_facts(spec: ModelSpec, dtype: str) -> Iterator[tuple[str, str]]:
    """Rows of what a model is and takes."""
    yield "family", f"{spec.family.architecture} ({spec.family.models})"
    yield "gives", _gives(spec)
    yield "layers", ", ".join(_layers(spec))
    yield "weights", ", ".join(_weights(spec, dtype))
    yield "KV cache", "; ".join(_kv_cache(spec))
    if spec.gives_logits:
        yield "drafts", _draft_indexes()
    short = spec.short_context
    others = (
        f"; above --max-model-len {short} frequencies of all prompts are others" if short else ""
    )
    longest, usual = spec.max_position_embeddings, spec.usual_length
    if usual is not None and usual < longest:
        others = f", or up to {longest:,} by --max-model-len{others}"
    yield "context", f"{min(longest, usual or longest):,} tokens{others}"


def _gives(spec: ModelSpec) -> str:
    """Purpose of the model, with the routes that serve it."""
    if spec.task == "score":
        return "scores of pairs of texts (POST /v1/rerank, /v1/score)"
    if spec.task == "classify":
        return "labels of texts (POST /classify)"
    if spec.task == "token_classify":
        return "labels of tokens (POST /pooling)"
    if spec.audio is not None:
        return "transcripts of audio (POST /v1/audio/transcriptions, /v1/audio/translations)"
    if spec.cross_encoder is not None:
        return "text made of a text (POST /v1/completions)"
    if "masked" in spec.vector_maps:
        return "a weight for each token of the vocabulary (POST /v1/embeddings)"
    if "token_vectors" in spec.vector_maps and "token_weights" not in spec.vector_maps:
        return "vectors of tokens (POST /pooling), by which /v1/rerank and /v1/score compare texts"
    if spec.task == "embed":
        return (
            "vectors of texts (POST /v1/embeddings), of which /v1/rerank and /v1/score make cosines"
        )
    return "text, and vectors of texts (POST /v1/embeddings)"


def _draft_indexes() -> str:
    """Memory of an engine in which `suffix`, which `auto` takes, looks up drafts."""
    pools = format_bytes(MOST_POOL_BYTES)
    return f"{INDEX_BYTES} B of the engine a token of a running request, and at most {pools} for recent answers"


def _kv_cache(spec: ModelSpec) -> Iterator[str]:
    vectors, numbers = spec.kv_vectors
    per_layer = vectors * spec.num_kv_heads * numbers * _KV_BYTES
    if spec.encoder is not None:
        yield f"none is kept: {format_bytes(per_layer)} a token in 16 bits while a step runs"
        return
    states = [layer.state for layer in spec.layers if layer.state is not None]
    kept = sum(it is not None for it in spec.kept_layers)
    per_token = (kept - len(states)) * per_layer
    if spec.cross_encoder is not None:
        longest = spec.usual_length or spec.cross_encoder.positions
        positions = -(-longest // _ENCODED_MULTIPLE) * _ENCODED_MULTIPLE
        each = "a transcript" if spec.audio is not None else "an answer"
        yield f"{format_bytes(positions * per_token)} {each} in 16 bits, with what is encoded"
        return
    if per_token:
        yield f"{format_bytes(per_token)} a token in 16 bits, about half in int8"
    if states:
        floats = sum(part.units * part.floats for it in states for part in it.states(it.sizes))
        yield f"{format_bytes(4 * floats)} a request for the states of {len(states)} layers"
        return
    kinds = [it and (KVKind(it[0]), it[1]) for it in spec.kept_layers]
    groups = layer_groups(kinds, _BLOCK_SIZE)
    if all(group.keeps_all for group in groups):
        return
    length = min(_LONG_CONTEXT, spec.max_position_embeddings)
    blocks = sum(group.num_blocks_for(length) - group.first_block(length) for group in groups)
    held = blocks * _BLOCK_SIZE * max(len(group.layers) for group in groups) * per_layer
    share = held / (length * per_token)
    yield (
        f"{format_bytes(held)} at {length:,} tokens, {share:.2f} of it, as windows give back what lies behind"
    )


def context_rows(
    spec: ModelSpec, weight_bytes: int, free_bytes: int, disk_bytes: int, bytes_per_s: float
) -> Iterator[tuple[str, ...]]:
    """Rows of the storeys that hold a context together: for how many tokens each has room, and what a token of an
    answer costs for those there. There are none of a model that keeps no token for ever.

    `bytes_per_s` is what memory reads. Windows and states are not streamed, and stay out of this."""
    vectors, numbers = spec.kv_vectors
    layers = sum(it is not None and KVKind(it[0]) in _STREAMED for it in spec.kept_layers)
    per_token = layers * vectors * spec.num_kv_heads * numbers * _KV_BYTES
    if not per_token or not spec.gives_logits or spec.cross_encoder is not None:
        return
    left = max(0, free_bytes - weight_bytes)
    storeys = [("memory", left, bytes_per_s), ("disk here", disk_bytes, _DISK_BYTES_PER_S)]
    for name, room, speed in storeys:
        cost_s = _PART_OF_CONTEXT * per_token / speed
        yield (
            name,
            format_bytes(room),
            f"{room // per_token:,}",
            f"{cost_s * 1e3:,.0f} ms at {speed / 1e9:.1f} GB/s",
        )
    yield "together", "", f"{sum(room for _, room, _ in storeys) // per_token:,}", ""


def _layers(spec: ModelSpec) -> Iterator[str]:
    yield f"{spec.num_layers} of {spec.hidden_size} channels"
    kept = f"{spec.num_kv_heads} of keys and values"
    if spec.latent is not None:
        kept = spec.latent.kept_name
    yield f"{spec.num_heads} heads of {spec.head_dim} over {kept}"
    kinds = Counter(_kind(layer) for layer in spec.layers)
    yield " and ".join(f"{count} with {kind}" for kind, count in kinds.items())
    if spec.experts is not None:
        routing = spec.experts.routing
        sparse = sum(isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers)
        yield f"{routing.experts_per_token} of {routing.num_experts} experts a token in {sparse}"


def _kind(layer: LayerSpec) -> str:
    if layer.replaced is not None:
        return "no attention" if layer.replaced == "nothing" else "a map in place of attention"
    if layer.kind is not None:
        return layer.kind.name
    if layer.attention.crosses:
        return "attention to what is encoded"
    if not layer.attention.causal:
        return "attention both ways"
    if layer.attention.chunk is not None:
        return f"chunks of {layer.attention.chunk} tokens"
    if layer.attention.window is None:
        return "full attention"
    return f"a window of {layer.attention.window} tokens"


def _weights(spec: ModelSpec, dtype: str) -> Iterator[str]:
    if not may_be_quantized(spec) and spec.quantization is not None:
        yield f"{format_bytes(held_bytes(spec, dtype))} as stored ({spec.quantization.summary})"
        return
    chosen = spec.dtype if dtype == "auto" else dtype
    for name in dict.fromkeys((chosen, "bfloat16")):
        if name in BYTES_PER_WEIGHT:
            yield f"{format_bytes(held_bytes(spec, name))} in {name}"
    if isinstance(spec.quantization, CheckpointQuantization):
        kept = replace(spec.quantization, keeps_fp8=True)
        held = format_bytes(held_bytes(replace(spec, quantization=kept), dtype))
        yield f"{held} as stored ({kept.summary}) where the backend has fp8"
    for name in ("int8", "int4"):
        yield f"about {format_bytes(held_bytes(spec, dtype, name))} with --quantization {name}"


def location(files: ModelFiles) -> str:
    """File or directory of a model, or that it has none."""
    path = files.gguf or files.directory
    return "no files: a shape with random weights" if path is None else str(Path(path))
