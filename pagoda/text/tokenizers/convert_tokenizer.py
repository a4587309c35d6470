# SPDX-License-Identifier: Apache-2.0
"""Writes the tokenizer of a model directory that has no tokenizer.json to standard output, as tokenizer.json.

    python -m pagoda.text.tokenizers.convert_tokenizer DIRECTORY

A program of its own, so that transformers and all that it imports end with it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

_PIECES = (1, 4)
"""Types of pieces of SentencePiece that are text: normal ones, and those that a user defined."""
_FAR = 1e4
"""Distance of scores that no segmentation has beside others."""
_SPACES = tokenizers.Regex(" {2,}")


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
        if hasattr(tokenizer, "spm_source"):
            return marian(tokenizer)
        return str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RuntimeError(
            f"transformers finds no tokenizer it can convert: {reason[0]}"
        ) from error


def marian(tokenizer: Any) -> str:
    """The tokenizer of OPUS-MT: SentencePiece finds pieces of the source language, and vocab.json has their ids.

    Pieces that vocab.json lacks are taken apart, where transformers' class has an unknown token for each.
    """
    proto = importlib.import_module("transformers.convert_slow_tokenizer").import_protobuf()
    model = proto.ModelProto.FromString(tokenizer.spm_source.serialized_model_proto())
    scores = {it.piece: it.score for it in model.pieces if it.type in _PIECES}
    ids = tokenizer.get_vocab()
    names = sorted(ids, key=lambda name: ids[name])
    if [ids[name] for name in names] != list(range(len(names))):
        raise ValueError("ids of vocab.json are not 0, 1, 2 and so on.")
    never = min(scores.values()) - _FAR
    pieces = [(name, scores.get(name, never)) for name in names]
    made = tokenizers.Tokenizer(models.Unigram(pieces, ids[tokenizer.unk_token]))
    rules = model.normalizer_spec.precompiled_charsmap
    maps = [normalizers.Precompiled(rules)] if rules else []
    tidy = [normalizers.Strip(), normalizers.Replace(_SPACES, " ")]
    made.normalizer = normalizers.Sequence(maps + tidy)
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    codes = tokenizer.supported_language_codes
    made.add_tokens([tokenizers.AddedToken(it, normalized=False, rstrip=True) for it in codes])
    made.add_special_tokens([it for it in tokenizer.all_special_tokens if it in ids])
    end = tokenizer.eos_token
    made.post_processor = processors.TemplateProcessing(f"$A {end}", None, [(end, ids[end])])
    return str(made.to_str())


def main() -> None:
    try:
        sys.stdout.write(convert(sys.argv[1]))
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
