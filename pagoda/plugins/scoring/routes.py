# SPDX-License-Identifier: Apache-2.0
"""The routes of this package."""

from __future__ import annotations

from pagoda.api.openai.answers import Embeddings, Scores
from pagoda.api.route import ANSWER, Route
from pagoda.plugins.scoring.classify import ClassifyRequest, PoolingRequest, classify, pooling
from pagoda.plugins.scoring.embeddings import EmbeddingRequest, embeddings
from pagoda.plugins.scoring.generative import GenerativeScoringRequest, generative_scoring
from pagoda.plugins.scoring.rerank import RerankRequest, ScoreRequest, rerank, score

_embeddings = Route(
    embeddings, "Vectors of texts.", ANSWER, EmbeddingRequest, Embeddings, is_queued=True
)
_score = Route(score, "Scores of pairs of texts.", ANSWER, ScoreRequest, Scores, is_queued=True)
_rerank = Route(
    rerank, "Documents by their scores against a query.", ANSWER, RerankRequest, is_queued=True
)

ROUTES: dict[str, dict[str, Route]] = {
    "/v1/embeddings": {"POST": _embeddings},
    "/embeddings": {"POST": _embeddings},
    "/pooling": {
        "POST": Route(
            pooling,
            "Vectors of texts or tokens, or scores of labels, as vLLM has it.",
            ANSWER,
            PoolingRequest,
            is_queued=True,
        )
    },
    "/classify": {
        "POST": Route(
            classify, "Scores of labels of texts.", ANSWER, ClassifyRequest, is_queued=True
        )
    },
    "/generative_scoring": {
        "POST": Route(
            generative_scoring,
            "Probabilities of labels behind items.",
            ANSWER,
            GenerativeScoringRequest,
            Scores,
            is_queued=True,
        )
    },
    "/v1/score": {"POST": _score},
    "/score": {"POST": _score},
    "/v1/rerank": {"POST": _rerank},
    "/v2/rerank": {"POST": _rerank},
    "/rerank": {"POST": _rerank},
    "/reranking": {"POST": _rerank},
    "/v1/reranking": {"POST": _rerank},
}
