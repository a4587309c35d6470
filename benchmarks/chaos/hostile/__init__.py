# SPDX-License-Identifier: Apache-2.0
"""Hostile clients beside good ones: attacks with the answers that are right, and the trial that measures them."""
