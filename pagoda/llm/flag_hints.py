# SPDX-License-Identifier: Apache-2.0
"""Flags that a wrong value of another flag probably meant."""

from __future__ import annotations

_ROUNDED = ("int8", "int4", "fp8")
_NUMBERS = ("float32", "bfloat16", "float16")
_STORED = (
    *(
        "awq",
        "awq_marlin",
        "gptq",
        "gptq_marlin",
        "compressed-tensors",
        "modelopt",
        "modelopt_fp4",
        "mxfp4",
    ),
    *("gguf", "bitsandbytes", "auto-round", "auto"),
)
"""Formats of files, which vLLM's `--quantization` names."""


def hint(flag: str, value: object) -> str:
    """The flag to write instead, to be told behind the error about `value`; empty where nothing is near."""
    if flag == "--dtype" and value in _ROUNDED:
        return f" Weights are rounded by --quantization {value}."
    if flag == "--quantization" and value in _NUMBERS:
        return f" Number formats are chosen by --dtype {value}."
    if flag == "--quantization" and value in _STORED:
        return " Checkpoints that are quantized already, and GGUF files, need no flag."
    if flag == "--load-format" and value in ("gguf", "safetensors", "hf"):
        return " auto reads safetensors and GGUF files alike."
    return ""
