# SPDX-License-Identifier: Apache-2.0
"""The backend of GPUs, NVIDIA's and AMD's, through torch and Triton; importing it imports neither."""

from pagoda.devices import BackendEntry

BACKEND = BackendEntry("pagoda.plugins.cuda.opening", "cuda")
