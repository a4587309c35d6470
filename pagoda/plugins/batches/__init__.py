# SPDX-License-Identifier: Apache-2.0
"""Files and batches of OpenAI's API, kept in a directory so that a batch goes on after a restart."""

from pagoda.api.plugin import ApiPlugin
from pagoda.plugins.batches.routes import ROUTES
from pagoda.plugins.batches.state import BatchState

API = ApiPlugin(routes=ROUTES, state=BatchState, flags="pagoda.plugins.batches.flags:FilesFlags")
