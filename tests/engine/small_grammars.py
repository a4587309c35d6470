# SPDX-License-Identifier: Apache-2.0
"""Grammars over the 50 tokens of the simulated model of these tests, and the answers that they lead to."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from pagoda.engine.structured_output.constraint import Constraint
from pagoda.engine.structured_output.grammars import Grammars
from pagoda.engine.structured_output.vocabulary import TokenTexts
from pagoda.messages.frontend import GenerateRequest, Grammar
from pagoda.plugins.sim.model import sim_token

VOCAB_SIZE = 50
EOS = VOCAB_SIZE - 1
_MERGES = [("a", "b"), ("c", "d"), ("ab", "cd"), ("t", "r"), ("u", "e"), ("tr", "ue"), ("x", "y")]
_ALPHABET = 'abcdefghtruxyz0123456789{}[]":,.-'

GRAMMARS = (
    Grammar("regex", "(ab|cd){2,9}e"),
    Grammar("regex", "[a-h]{1,9}"),
    Grammar("regex", "abcdabcdx(true|xyxyxy){1,2}z"),
    Grammar("regex", "(a|b)true(c|d)trueabcdabcdabcd(e|f)"),
    Grammar("regex", "a*"),
    Grammar(
        "json_schema",
        '{"type": "object", "properties": {"ab": {"type": "boolean", "const": true}, "xy": {"enum": ["cd", 12]}},'
        ' "required": ["ab", "xy"], "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}',
    ),
)


@cache
def token_texts() -> TokenTexts:
    """Single characters, some longer tokens, and an end-of-sequence token."""
    merged = [left + right for left, right in _MERGES]
    vocab = {token: i for i, token in enumerate([*_ALPHABET, *merged])}
    # The places in between belong to tokens that no text is cut into.
    fill = [f"ĀĀ{i}" for i in range(EOS - len(vocab))]
    vocab |= {token: i for i, token in enumerate(fill, start=len(vocab))}
    backend = Backend(BPE(vocab=vocab, merges=_MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", normalized=False)])
    assert backend.token_to_id("<end>") == EOS
    return TokenTexts(backend.to_str(), (EOS,))


def text_of(token_ids: list[int]) -> str:
    return str(Backend.from_str(token_texts().tokenizer).decode(token_ids))


def open_grammars() -> Grammars:
    """Grammars that are compiled at once, by whoever asks."""
    return Grammars(token_texts, VOCAB_SIZE, run=lambda work: work())


@cache
def _grammars() -> Grammars:
    return open_grammars()


def constraint_of(request: GenerateRequest) -> Constraint | None:
    """The request's place in its grammar, behind its output."""
    if request.grammar is None:
        return None
    found = _grammars().take(request, request.grammar)
    if found is None:
        ((_, found),) = _grammars().drain()
    assert isinstance(found, Constraint), found
    return found


def constrained_tokens(request: GenerateRequest, max_model_len: int = 2**31) -> list[int]:
    """Tokens that the simulated model answers within the request's grammar, one by one and without an engine."""
    constraint, sampling = constraint_of(request), request.work.sampling
    assert constraint is not None
    tokens, output = list(request.prompt_token_ids), []
    ends = {*request.work.eos_token_ids, *sampling.stop_token_ids}
    while len(output) < (sampling.max_tokens or max_model_len) and len(tokens) < max_model_len:
        forced = constraint.forced_tokens() if sampling.logprobs is None else []
        for token in forced or [_chosen(request, constraint, output, tokens[-1])]:
            tokens.append(token)
            output.append(token)
            is_end = token in ends and len(output) >= sampling.min_tokens
            is_full = len(output) == sampling.max_tokens or len(tokens) == max_model_len
            if token == EOS or is_end or is_full:
                return output
            assert constraint.consume(token)
            if len(output) == 1:
                break  # the first token comes alone: nothing is behind the prompt yet
    return output


def _chosen(
    request: GenerateRequest, constraint: Constraint, output: list[int], previous: int
) -> int:
    sampling = request.work.sampling
    held_back = {EOS} if sampling.ignore_eos else set()
    if len(output) < sampling.min_tokens:
        held_back |= {EOS, *request.work.eos_token_ids, *sampling.stop_token_ids}
    mask = constraint.mask(sorted(held_back))
    assert mask is not None
    token = sim_token(sampling.seed or 0, len(output), previous, VOCAB_SIZE)
    while not mask[token >> 3] >> (token & 7) & 1:
        token = (token + 1) % VOCAB_SIZE
    return token
