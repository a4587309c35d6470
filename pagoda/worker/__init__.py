# SPDX-License-Identifier: Apache-2.0
"""The worker process: loads a model, executes step plans, samples."""
