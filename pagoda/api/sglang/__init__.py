# SPDX-License-Identifier: Apache-2.0
"""The routes that SGLang's server has of its own."""
