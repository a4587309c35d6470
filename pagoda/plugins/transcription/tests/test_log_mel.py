# SPDX-License-Identifier: Apache-2.0
"""Features are those of transformers' extractor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from pagoda.messages.audio import FeatureSpec
from pagoda.plugins.transcription.log_mel import LogMel


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("seconds", [0.01, 3.3, 30.0])
def test_features_are_those_of_transformers(bins: int, seconds: float) -> None:
    rng = np.random.default_rng(0)
    samples = rng.normal(0, 0.1, int(16_000 * seconds)).astype(np.float32)
    samples *= np.sin(np.arange(len(samples), dtype=np.float32) / 3000)
    extractor = WhisperFeatureExtractor(feature_size=bins)
    expected = extractor(samples, sampling_rate=16_000, return_tensors="np").input_features[0]
    found = LogMel(FeatureSpec(bins, 3000, 16_000, 400, 160))(samples)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, _exact(bins, samples), atol=1e-6, rtol=0)
    # The extractor computes in float32 where there is torch.
    np.testing.assert_allclose(found, expected, atol=3e-5, rtol=0)


def _exact(bins: int, samples: Any) -> Any:
    """The same with what transformers has in float64."""
    padded = np.pad(samples, (0, 480_000 - len(samples)))
    filters = mel_filter_bank(201, bins, 0.0, 8000.0, 16_000, norm="slaney", mel_scale="slaney")
    window = window_function(400, "hann")
    logs = spectrogram(padded, window, 400, 160, power=2.0, mel_filters=filters, log_mel="log10")
    logs = logs[:, :-1]
    return (np.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0


def test_silence_has_features() -> None:
    found = LogMel(FeatureSpec(80, 3000, 16_000, 400, 160))(np.zeros(0, np.float32))
    assert found.shape == (80, 3000)
    assert np.unique(found).tolist() == [np.float32(-1.5)]
