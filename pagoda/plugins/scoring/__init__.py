# SPDX-License-Identifier: Apache-2.0
"""Routes that answer with vectors, scores and ranks of texts."""

from pagoda.api.plugin import ApiPlugin, LineForm
from pagoda.plugins.scoring.embeddings import EmbeddingRequest, answer_embeddings
from pagoda.plugins.scoring.routes import ROUTES

API = ApiPlugin(
    routes=ROUTES, line_forms={"/v1/embeddings": LineForm(EmbeddingRequest, answer_embeddings)}
)
