# SPDX-License-Identifier: Apache-2.0
"""Trials of the pypto backend over the model of the device in `tests/pypto_device`."""
