# SPDX-License-Identifier: Apache-2.0
"""Training rows: conversations rendered, encoded, masked to the answers and packed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.train_tiny import skills
from tools.train_tiny.tokenizer import END_OF_TEXT, IM_END, IM_START, render_chat, token_id


@dataclass(frozen=True)
class Row:
    """Token ids of one packed row and, for every position, whether it is an answer token."""

    ids: NDArray[np.int64]
    answer: NDArray[np.bool_]


class RowBuilder:
    """Builds rows from conversations; all randomness comes from the generator handed in."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.im_start = token_id(tokenizer, IM_START)
        self.im_end = token_id(tokenizer, IM_END)
        self.end = token_id(tokenizer, END_OF_TEXT)
        self.assistant = tokenizer.encode("assistant\n").ids[0]

    def encode(self, chat: skills.Conversation) -> tuple[list[int], list[bool]]:
        """Return the ids of a chat and the mask of its answers (<|im_end|> included)."""
        text = render_chat(chat.messages, chat.tools, enable_thinking=chat.thinking)
        ids = self.tokenizer.encode(text).ids
        mask, answering = [], False
        for i, token in enumerate(ids):
            mask.append(answering)
            if token == self.im_end:
                answering = False
            elif token == self.assistant and i and ids[i - 1] == self.im_start:
                answering = True
        return [*ids, self.end], [*mask, False]

    def row(
        self,
        rng: random.Random,
        length: int,
        weights: dict[str, float],
        max_lines: int,
        long_recall: bool,
    ) -> Row:
        """Return a row of `length` tokens; with `long_recall` it holds one long recall chat.

        Chats that do not fit are drawn again a few times; what stays free is filled with
        end-of-text tokens that carry no loss.
        """
        chats: list[tuple[list[int], list[bool]]] = []
        free = length
        if long_recall:
            lines = max_lines
            while True:
                low = max(20, lines // 3)
                count = rng.randint(low, max(low, lines))
                chat = self.encode(skills.recall_conversation(rng, count, 8))
                if len(chat[0]) <= length:
                    break
                lines = int(lines * 0.9)
            chats.append(chat)
            free -= len(chat[0])
        misses = 0
        while misses < 4 and free > 16:
            chat = self.encode(skills.sample_conversation(rng, weights, min(max_lines, free // 14)))
            if len(chat[0]) <= free:
                chats.append(chat)
                free -= len(chat[0])
            else:
                misses += 1
        rng.shuffle(chats)
        ids = [token for chat in chats for token in chat[0]] + [self.end] * free
        mask = [m for chat in chats for m in chat[1]] + [False] * free
        return Row(np.array(ids, dtype=np.int64), np.array(mask, dtype=np.bool_))
