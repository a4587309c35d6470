"""A foreign backend in plain numpy; this module is light, `pagoda_toy.backend` is imported by workers."""

from pagoda.devices import BackendEntry

TOY = BackendEntry(module="pagoda_toy.backend", device_kind="toy", max_devices=2)
