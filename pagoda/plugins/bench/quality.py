# SPDX-License-Identifier: Apache-2.0
"""`pagoda bench quality`: next-token distributions of a model beside those of a reference, on texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Group, Parameter
from cyclopts.validators import Number
from rich.table import Table

from pagoda.checkpoints.resolve import ModelFiles, load_model_config, resolve_model
from pagoda.cli import output
from pagoda.cli.files import write_json
from pagoda.cli.options import GeneralOptions
from pagoda.cli.progress import job_progress
from pagoda.devices import check_backend
from pagoda.errors import ConfigError
from pagoda.executor.jobs import run_job
from pagoda.llm.engine_options import (
    Count,
    Dtype,
    EngineOptions,
    GroupSize,
    QuantizationName,
)
from pagoda.messages.jobs import Closeness, QualityConfig, QualityResult
from pagoda.messages.kv_formats import KVDtype
from pagoda.messages.worker_config import WorkerConfig
from pagoda.text.model_text import load_text
from pagoda.text.text_files import Tokenized, read_text, tokenize

_JOB = "pagoda.plugins.bench.quality_job"


@Parameter(name="*", group=Group("Model", sort_key=10))
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Number formats of MODEL, as serve has them."""

    dtype: Dtype = "auto"
    """Number format of weights and activations; auto takes the checkpoint's."""
    quantization: QuantizationName = "none"
    """Round dense weights as they are loaded."""
    quantization_group_size: GroupSize | None = None
    """Inputs that share a scale in int4, 32 by default."""
    quantization_calibration: Annotated[str | None, Parameter(metavar="FILE")] = None
    """A text by which weights are rounded; takes a minute or two."""
    kv_cache_dtype: KVDtype = "auto"
    """Number format of the KV cache; auto takes that of activations."""
    backend: str = "auto"
    """cpu has native kernels, reference is plain PyTorch; auto takes cpu where it is available; others are
    brought by packages."""
    threads: Count | None = None
    """CPU threads; by default the cores that this process may use."""

    def engine_options(self) -> EngineOptions:
        return EngineOptions(**vars(self))


@Parameter(name="*", group=Group("Reference", sort_key=11))
@dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
    """The model that is taken as right, and its number formats."""

    reference: str | None = None
    """A model directory, GGUF file or hub id, by default MODEL; quantized weights become plain numbers."""
    reference_dtype: Dtype = "float32"
    """Number format of weights and activations of the reference."""
    reference_quantization: QuantizationName = "none"
    """Round dense weights of the reference too."""
    reference_kv_cache_dtype: KVDtype = "auto"
    """Number format of the KV cache of the reference; auto takes that of activations."""
    reference_backend: str = "auto"
    """Backend of the reference."""

    def engine_options(self, threads: int | None) -> EngineOptions:
        return EngineOptions(
            dtype=self.reference_dtype,
            quantization=self.reference_quantization,
            kv_cache_dtype=self.reference_kv_cache_dtype,
            backend=self.reference_backend,
            threads=threads,
        )


def quality(
    model: str | None = None,
    *,
    text: Annotated[tuple[Path, ...], Parameter(negative=(), show_default=False)],
    context_len: Annotated[int, Parameter(validator=Number(gte=2))] = 512,
    max_tokens: Annotated[int | None, Parameter(validator=Number(gte=2))] = None,
    output_file: Annotated[Path | None, Parameter(name=["--output", "--json"])] = None,
    options: ModelOptions = ModelOptions(),
    reference: ReferenceOptions = ReferenceOptions(),
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Compare a model's next-token distributions with those of a reference, at every position of a text.

    Args:
        model: The model to judge; by default the embedded one.
        text: A file of UTF-8 text; may be given several times.
        context_len: Tokens of a window.
        max_tokens: Read only so many tokens of each text.
        output_file: Write the figures as JSON to this file too.
    """
    general.apply()
    for backend in (options.backend, reference.reference_backend):
        check_backend(backend, ())
    files = resolve_model(model)
    reference_files = resolve_model(model if reference.reference is None else reference.reference)
    for it in (files, reference_files):
        _check_context(it, context_len)
    texts = [read_text(path, "--text") for path in text]
    tokenized = _tokenize(files, reference_files, text, texts)
    prefix = tokenized[0].prefix
    if context_len < len(prefix) + 2:
        raise ConfigError(f"--context-len must be at least {len(prefix) + 2}, got {context_len}.")
    config = QualityConfig(
        model=options.engine_options().engine_config(files.model).worker,
        reference=_exact(
            reference.engine_options(options.threads).engine_config(reference_files.model).worker
        ),
        texts=[it.ids[:max_tokens] for it in tokenized],
        prefix=prefix,
        context_len=context_len,
    )
    with job_progress("tokens") as on_progress:
        result = run_job(_JOB, config, QualityResult, on_progress)
    console = output.stdout()
    console.print(
        output.facts(
            [
                ("model", f"{files.served_name}: {result.model}"),
                ("reference", f"{reference_files.served_name}: {result.reference}"),
                ("windows", f"{context_len} tokens"),
            ]
        )
    )
    console.print(quality_table(text, result))
    if output_file is not None:
        write_json(output_file, _record(files, reference_files, config, text, result))
    return 0


def _exact(worker: WorkerConfig) -> WorkerConfig:
    """The same with the numbers that quantized weights stand for, and inputs as they are."""
    return msgspec.structs.replace(worker, dequantizes=True)


def quality_table(paths: Sequence[Path], result: QualityResult) -> Table:
    names = [str(path) for path in paths]
    rows = [*zip(names, result.texts, strict=True)]
    if len(rows) > 1:
        rows.append(("all", result.overall))
    columns = ("text", "positions", "perplexity", "of the reference")
    return output.table(
        "Closeness to the reference",
        (*columns, "mean KL", "KL p99", "KL max", "KL of top 20", "same top token"),
        ((name, *_cells(it)) for name, it in rows),
    )


def _cells(it: Closeness) -> Iterable[str]:
    yield f"{it.positions:,}"
    yield f"{it.perplexity:.3f}"
    yield f"{it.reference_perplexity:.3f}"
    yield from (f"{value:.5f}" for value in (it.kl_mean, it.kl_p99, it.kl_max, it.kl_top20))
    yield f"{it.same_top_token:.2%}"


def _record(
    model: ModelFiles,
    reference: ModelFiles,
    config: QualityConfig,
    paths: Sequence[Path],
    result: QualityResult,
) -> dict[str, object]:
    texts = [
        {"text": str(path), **msgspec.structs.asdict(it)}
        for path, it in zip(paths, result.texts, strict=True)
    ]
    return {
        "model": {"name": model.served_name, "summary": result.model},
        "reference": {"name": reference.served_name, "summary": result.reference},
        "context_len": config.context_len,
        "texts": texts,
        "all": msgspec.structs.asdict(result.overall),
    }


def _check_context(files: ModelFiles, context_len: int) -> None:
    spec = load_model_config(files.model, "auto")
    longest = spec.max_position_embeddings
    if spec.cross_encoder is not None:
        raise ConfigError(
            f"{files.served_name} has an encoder beside its decoder, and no quality on texts."
        )
    if context_len > longest:
        raise ConfigError(
            f"--context-len must be at most {longest}, the context of {files.served_name}, got {context_len}."
        )


def _tokenize(
    model: ModelFiles, reference: ModelFiles, paths: Sequence[Path], texts: Sequence[str]
) -> list[Tokenized]:
    """Raises ConfigError: the models make other tokens of a text, or a text is too short to predict anything."""
    tokenizers = [
        load_text(files, simulated=False, chat_template=None).tokenizer
        for files in ([model] if model == reference else [model, reference])
    ]
    result = []
    for path, text in zip(paths, texts, strict=True):
        tokenized, *others = [tokenize(tokenizer, text) for tokenizer in tokenizers]
        if any(other.ids != tokenized.ids for other in others):
            raise ConfigError(
                f"{model.served_name} and {reference.served_name} make different tokens of {path}; only models of "
                "one vocabulary compare."
            )
        if len(tokenized.ids) < 2:
            raise ConfigError(f"--text: {path} has one token; at least two are needed.")
        result.append(tokenized)
    return result
