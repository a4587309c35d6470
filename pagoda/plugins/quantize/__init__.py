# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints: `pagoda quantize`."""

from pagoda.cli.command import Command, CommandPlugin

COMMANDS = CommandPlugin(
    {
        "quantize": Command(
            "Write a quantized model that Pagoda and others can read.",
            "pagoda.plugins.quantize.command:quantize",
            (
                "Files are in the format compressed-tensors, which vLLM and transformers read "
                "too. Embedding, head and routers of experts stay as they are; tokenizer, chat "
                "template and licence are copied. OUT appears when all is written; an interrupt "
                "leaves nothing behind."
            ),
        ),
    }
)
