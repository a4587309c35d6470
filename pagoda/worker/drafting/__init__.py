# SPDX-License-Identifier: Apache-2.0
"""Drafters with weights of their own, which run in the worker."""
