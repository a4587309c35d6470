# SPDX-License-Identifier: Apache-2.0
"""Every type that crosses a process boundary, as a `msgspec.Struct`: one module for each wire."""
