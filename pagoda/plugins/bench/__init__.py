# SPDX-License-Identifier: Apache-2.0
"""`pagoda bench`: load on servers, throughput without one, and right answers counted."""

from pagoda.cli.command import Command, CommandPlugin

COMMANDS = CommandPlugin(
    {
        "bench": Command("Benchmarks."),
        "bench serve": Command(
            "Put load on any OpenAI-compatible server.", "pagoda.plugins.bench.serve:serve"
        ),
        "bench compare": Command(
            "Put the same load on two or more servers in turn, and compare.",
            "pagoda.plugins.bench.compare:compare",
        ),
        "bench offline": Command(
            "Measure the throughput of the engine without HTTP.",
            "pagoda.plugins.bench.offline:offline",
        ),
        "bench steps": Command(
            "Measure the time of steps, by what is in them.", "pagoda.plugins.bench.steps:steps"
        ),
        "bench accuracy": Command(
            "Ask held-out questions and count the right answers.",
            "pagoda.plugins.bench.accuracy:accuracy",
        ),
        "bench quality": Command(
            "Compare next-token distributions with those of a reference.",
            "pagoda.plugins.bench.quality:quality",
            (
                "Both models read the same text in windows, each from an empty context. At every "
                "position the whole distributions are compared: KL is KL(reference || model) over "
                "the full vocabulary in nats, its mean, 99th percentile and maximum over the "
                "positions; KL of the top 20 takes all but the 20 tokens that MODEL finds most "
                "likely as one, as clients that see log-probabilities must; the same top token is "
                "the share of positions where both find the same token most likely; perplexity is "
                "exp of the mean negative log-probability of the text's own tokens."
            ),
        ),
    }
)
