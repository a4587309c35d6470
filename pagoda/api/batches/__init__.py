# SPDX-License-Identifier: Apache-2.0
"""Files and batches of OpenAI's API, kept in a directory so that a batch goes on after a restart."""
