# SPDX-License-Identifier: Apache-2.0
"""Foreign backends in plain numpy; this module is light, the backends' own are imported by workers."""

from pagoda.devices import BackendEntry

TOY = BackendEntry(module="pagoda_toy.backend", device_kind="toy", max_devices=2)
FAR = BackendEntry(module="pagoda_toy.far", device_kind="far")
