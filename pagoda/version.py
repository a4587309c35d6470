# SPDX-License-Identifier: Apache-2.0
"""The version of Pagoda, in a module that imports nothing."""

__version__ = "0.1.0"
