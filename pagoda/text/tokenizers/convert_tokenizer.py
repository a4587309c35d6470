# SPDX-License-Identifier: Apache-2.0
"""Writes the tokenizer of a model directory that has no tokenizer.json to standard output, as tokenizer.json.

    python -m pagoda.text.tokenizers.convert_tokenizer DIRECTORY

A program of its own, so that transformers and all that it imports end with it.
"""

from __future__ import annotations

import importlib
import sys


def convert(directory: str) -> str:
    """The text of a tokenizer.json.
    Raises RuntimeError: transformers is not installed, or cannot make a fast tokenizer of this directory."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise RuntimeError(
            "that needs transformers: pip install 'pagoda-llm[transformers]'."
        ) from None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        return str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RuntimeError(
            f"transformers finds no tokenizer it can convert: {reason[0]}"
        ) from error


def main() -> None:
    try:
        sys.stdout.write(convert(sys.argv[1]))
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
