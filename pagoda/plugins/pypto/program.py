# SPDX-License-Identifier: Apache-2.0
"""A decoder's graph as calls of its programs.

Programs give logits and keep hidden states to themselves. So the rows of hidden states that a step gives are
references, [m, 1] float32: each the number of a token's row in a call whose logits are on the chips. From these,
`logits` and `argmax` are read, and tokens drawn. A reference that was made NaN is a row of NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagoda.backend.base import StepInput
from pagoda.backend.operation import Operation
from pagoda.backend.reference.sampling import as_arrays, sample_candidates, sample_row
from pagoda.backend.sampling import SampledRow, SampledRows
from pagoda.backend.sampling_table import SamplingTable
from pagoda.plugins.pypto.pool import Pool
from pagoda.plugins.pypto.session import NUM_CALLS, Session
from pagoda.plugins.pypto.steps import StepPlaces
from pagoda.telemetry.tracer import Tracer

HIDDEN, LOGITS, ARGMAX = "last_hidden", "logits", "argmax"
"""Results of a decoder's graph."""


class DecoderPrograms:
    """The steps of one decoder over one pool."""

    def __init__(self, session: Session, pool: Pool) -> None:
        self._session, self._pool = session, pool
        self._tokens: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * NUM_CALLS
        """Ids and positions of the tokens of each call."""
        self._stride = session.contract.limits.prefill_tokens

    def operations(self, results: Sequence[str]) -> Sequence[Operation]:  # noqa: ARG002
        """The program of a step, whose time is that of the chips."""
        weight_bytes = sum(
            linear.outputs * linear.inputs * linear.dtype.itemsize
            for linear in self._session.linears
        )
        flops = 2 * sum(linear.outputs * linear.inputs for linear in self._session.linears[1:-1])
        return [Operation("decoder", "linear", weight_bytes, flops)]

    def __call__(self, step: StepInput[StepPlaces], results: Sequence[str]) -> tuple[Tensor, ...]:
        """The results of these names. Raises ValueError: a step wants hidden states and what is made of them."""
        given = step.tensors.get(HIDDEN)
        if given is not None:
            make = {LOGITS: self._logits, ARGMAX: self._argmax}
            return tuple(make[name](given) for name in results)
        if list(results) != [HIDDEN]:
            raise ValueError(f"A step gives {HIDDEN}, from which others are made, not {results}.")
        return (self._begin(step),)

    def traced(
        self,
        step: StepInput[StepPlaces],
        results: Sequence[str],
        tracer: Tracer,  # noqa: ARG002
    ) -> tuple[tuple[Tensor, ...], Sequence[int]]:
        """The same results of a step, and how long the chips took for its program."""
        references = self(step, results)
        call = self._session.latest
        call.submitted.wait()
        return references, [call.submitted.device_ns]

    def profile(self, step: StepInput[StepPlaces], results: Sequence[str]) -> int:  # noqa: ARG002
        """0: the step is computed once over the scratch page, and what programs work in is taken from then on."""
        number = self._session.begin(
            self._pool, step.metadata[0], step.tensors["token_ids"], warm_up=True
        )
        self._session.call(number).submitted.wait()
        return 0

    def sample(self, hidden: Tensor, table: SamplingTable, slots: Sequence[int]) -> SampledRows:
        """The next token of each slot, from candidates that a chip chooses, or from all logits.

        Raises ValueError: there are not as many references [slots, 1] as slots.
        """
        if len(hidden) != len(slots):
            raise ValueError(f"{len(hidden)} rows of hidden states are not of {len(slots)} slots.")
        drawn = self._from_candidates(hidden, table, slots)
        others = [at for at in range(len(slots)) if at not in drawn]
        if others:
            for at, logits in zip(others, self._logits(hidden[others]), strict=True):
                drawn[at] = sample_row(logits, table.row(slots[at]))
        in_order = [drawn[at] for at in range(len(slots))]
        return as_arrays(in_order, table.most_reported(slots))

    def _from_candidates(
        self, references: Tensor, table: SamplingTable, slots: Sequence[int]
    ) -> dict[int, SampledRow]:
        """Tokens by place in `slots`, where candidates decide them: as many as the slot would have alone."""
        number, rows, known = self._split(references)
        call, sizes = self._session.call(number), self._session.contract.sizes
        most = min(self._session.contract.limits.topk, sizes["REAL_V"])
        counts = {
            at: count
            for at, slot in enumerate(slots)
            if known[at] and rows[at] in call.places.last_rows
            if 0 < (count := table.num_candidates(slot)) <= most
        }
        if not counts:
            return {}
        values, tokens = self._session.highest(call, max(counts.values()))
        found = {}
        for at, count in counts.items():
            own = call.places.last_rows[rows[at]]
            row = table.row(slots[at])
            drawn = sample_candidates(values[own, :count], tokens[own, :count], row)
            if drawn is not None:
                found[at] = drawn
        return found

    def _begin(self, step: StepInput[StepPlaces]) -> Tensor:
        token_ids, rows = step.tensors["token_ids"], step.tensors["rows"]
        number = self._session.begin(self._pool, step.metadata[0], token_ids)
        self._tokens[number] = token_ids, step.tensors["positions"]
        return (rows + number * self._stride)[:, None].float()

    def _split(self, references: Tensor) -> tuple[int, list[int], list[bool]]:
        """The call that references are of, the row of each, and which of them stand for a row."""
        known = (~references.isnan()).flatten().tolist()
        numbers = references.nan_to_num(0).long().flatten().tolist()
        calls = {
            number // self._stride for number, holds in zip(numbers, known, strict=True) if holds
        }
        if len(calls) > 1:
            raise ValueError("Rows of hidden states are of one step.")
        return min(calls, default=0), [number % self._stride for number in numbers], known

    def _logits(self, references: Tensor) -> Tensor:
        """Logits [m, vocab] float32 in host memory."""
        number, rows, known = self._split(references)
        call = self._session.call(number)
        out = torch.full((len(rows), self._session.contract.sizes["REAL_V"]), torch.nan)
        held = [at for at, row in enumerate(rows) if known[at] and row in call.places.last_rows]
        if held:
            sequences = [call.places.last_rows[rows[at]] for at in held]
            out[held] = self._session.logits(call, sequences)
        others = [
            at for at, row in enumerate(rows) if known[at] and row not in call.places.last_rows
        ]
        most = self._session.contract.limits.max_batch
        for first in range(0, len(others), most):
            some = others[first : first + most]
            out[some] = self._scored(number, [rows[at] for at in some])
        return out

    def _scored(self, number: int, rows: list[int]) -> Tensor:
        """Logits of tokens that are not the last of their sequences, which are computed once more."""
        token_ids, positions = self._tokens[number]
        places = self._session.call(number).places
        sequences = torch.repeat_interleave(places.query_lens.long())
        chosen = places.rows(rows, sequences, positions)
        return self._session.score(self._pool, chosen, token_ids[rows])

    def _argmax(self, references: Tensor) -> Tensor:
        """[m, 3] int64 of rows that end their sequences: token, bits of its logit, and 1 if that is finite."""
        number, rows, known = self._split(references)
        call = self._session.call(number)
        if not all(
            row in call.places.last_rows for row, holds in zip(rows, known, strict=True) if holds
        ):
            logits = self._logits(references)
            values, tokens = logits.max(dim=1)
            finite = logits.isfinite().all(dim=1)
        else:
            of_rows = torch.tensor([call.places.last_rows.get(row, 0) for row in rows])
            values, tokens = (part[of_rows, 0] for part in self._session.highest(call, 1))
            finite = values.isfinite() & torch.tensor(known)
        bits = values.contiguous().view(torch.int32).long()
        return torch.stack((tokens.long(), bits, finite.long()), dim=1)
