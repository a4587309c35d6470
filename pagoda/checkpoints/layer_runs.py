# SPDX-License-Identifier: Apache-2.0
"""Layers of a model that stay on one stage; no torch."""

from __future__ import annotations

from pagoda.checkpoints.model_spec import ModelSpec


def layer_runs(spec: ModelSpec) -> list[range]:
    """Layers that stay together: of one input, of which one counts behind, or is mixed with, another one, or one
    sees what an encoder gives.

    Those without attention go with one that has it, so that every stage keeps something of a sequence.
    """
    carried = spec.experts is not None and spec.experts.carried
    each = 2 if carried or spec.cross_encoder is not None else 1
    follow = {
        at
        for at, layer in enumerate(spec.layers)
        if layer.same_input or layer.joins_before or layer.replaced is not None
    }
    first = next((at for at, layer in enumerate(spec.layers) if layer.replaced is None), 0)
    follow |= {*range(1, first + 1)}
    for at, layer in enumerate(spec.layers):
        for source, _ in layer.mixed_with:
            follow |= {*range(source + 1, at + 1)}
    begins = [at for at in range(0, spec.num_layers, each) if at == 0 or at not in follow]
    return [*map(range, begins, [*begins[1:], spec.num_layers])]
