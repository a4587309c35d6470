# SPDX-License-Identifier: Apache-2.0
"""Log-mel features with numpy: the numbers of transformers' `WhisperFeatureExtractor`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagoda.messages.audio import FeatureSpec

_LEAST, _RANGE = 1e-10, 8.0
"""Least energy, and decades below the highest one that count."""
_LINEAR_HZ, _LINEAR_MELS = 1000.0, 15.0
"""Frequency from which on Slaney's scale is logarithmic, as both."""
_LOG_STEP = np.log(6.4) / 27.0


def _mels(hertz: Any) -> Any:
    return np.where(
        hertz < _LINEAR_HZ,
        hertz * 3.0 / 200.0,
        _LINEAR_MELS + np.log(np.maximum(hertz, _LINEAR_HZ) / _LINEAR_HZ) / _LOG_STEP,
    )


def _hertz(mels: Any) -> Any:
    return np.where(
        mels < _LINEAR_MELS,
        mels * 200.0 / 3.0,
        _LINEAR_HZ * np.exp(_LOG_STEP * (np.maximum(mels, _LINEAR_MELS) - _LINEAR_MELS)),
    )


def _filters(spec: FeatureSpec) -> NDArray[np.float64]:
    """Triangles [frequencies, mel_bins] of equal area, up to half of 16 kHz (Slaney 1998)."""
    frequencies = np.linspace(0, spec.rate // 2, spec.window // 2 + 1)
    edges = _hertz(np.linspace(_mels(0.0), _mels(8000.0), spec.mel_bins + 2))
    widths = np.diff(edges)
    slopes = edges[None] - frequencies[:, None]
    falling, rising = slopes[:, 2:] / widths[1:], -slopes[:, :-2] / widths[:-1]
    areas = 2.0 / (edges[2:] - edges[:-2])
    triangles: NDArray[np.float64] = np.maximum(0, np.minimum(falling, rising)) * areas
    return triangles


class LogMel:
    """Makes features of pieces of audio."""

    def __init__(self, spec: FeatureSpec) -> None:
        self._spec = spec
        self._filters = _filters(spec)
        # A period of the window of Hann, as transforms want it.
        self._hann = np.hanning(spec.window + 1)[:-1]

    def __call__(self, samples: NDArray[Any]) -> NDArray[np.float32]:
        """Features [mel_bins, frames] of up to so many samples [n] as a piece has; silence follows them."""
        spec, half = self._spec, self._spec.window // 2
        whole = np.zeros(spec.samples)
        whole[: len(samples)] = samples
        padded = np.pad(whole, half, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, spec.window)[:: spec.hop]
        spectrum = np.fft.rfft(frames[: spec.frames] * self._hann)
        energies = np.maximum(_LEAST, (np.abs(spectrum) ** 2) @ self._filters)
        logs = np.log10(energies).T
        logs = np.maximum(logs, logs.max() - _RANGE)
        return np.ascontiguousarray((logs + 4.0) / 4.0, dtype=np.float32)
