# SPDX-License-Identifier: Apache-2.0
"""The Ascend backend: whole decoders as programs of a PyPTO kernel library; importing this imports no torch."""

from pagoda.devices import BackendEntry

PYPTO = BackendEntry("pagoda.plugins.pypto.backend", "npu", max_devices=16, shares_ranks=False)
