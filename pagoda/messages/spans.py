# SPDX-License-Identifier: Apache-2.0
"""Parts of a prompt that are no tokens: their embeddings are given, and their content has a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from operator import gt
from typing import Annotated

import msgspec
from msgspec import Meta

from pagoda.messages.ranges import Count, Size


class EmbeddedSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive places of a prompt whose embeddings are given instead of looked up.

    The prompt has a token id at each of the places, which counts and takes a position as all do. Any valid id will
    do; the model does not see it, but penalties of repeated tokens do.
    """

    start: Count
    """Place of the first of these in the prompt."""
    length: Size
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """SHA-256 of the content: spans of equal digests have equal vectors, so that their KV is shared.
    Who makes a span computes it (`embedded_span`), and hands on none of a client's."""
    vectors: bytes
    """[length, hidden] float32, little-endian: the input of the model's first layer."""

    @property
    def end(self) -> int:
        """The place behind the last."""
        return self.start + self.length


def embedded_span(start: int, length: int, vectors: bytes) -> EmbeddedSpan:
    """The span of `length` vectors from the place `start` on, whose digest is that of the vectors."""
    return EmbeddedSpan(start, length, hashlib.sha256(vectors).digest(), vectors)


def problem_with_spans(
    spans: Sequence[EmbeddedSpan], num_prompt_tokens: int, hidden_size: int
) -> str | None:
    """Clause that says why spans cannot be of a prompt, for a model whose vectors have `hidden_size` numbers."""
    ends = [0, *(span.end for span in spans)]
    if ends[-1] > num_prompt_tokens or any(map(gt, ends, (span.start for span in spans))):
        return "embedded spans must lie in the prompt, one behind the other"
    for span in spans:
        if len(span.vectors) != 4 * span.length * hidden_size:
            return (
                f"an embedded span of {span.length} places must have {span.length} vectors of {hidden_size} "
                f"float32, got {len(span.vectors)} bytes"
            )
    return None
