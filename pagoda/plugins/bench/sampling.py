# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of a benchmark's requests: every request says them, so that servers compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from pagoda.cli.options import SamplingOptions
from pagoda.errors import ConfigError, InvalidRequestError
from pagoda.messages.sampling_params import DRAWS, SamplingParams
from pagoda.plugins.bench.datasets import Endpoint, Sample

_NEUTRAL: Mapping[str, object] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Values that change nothing, of the parameters for which servers have defaults of their own."""
_GROUP = Group("Sampling", sort_key=30)


@Parameter(name="*", group=_GROUP)
@dataclass(frozen=True, kw_only=True)
class BenchSampling:
    """Sampling of all requests: greedy without a --temperature, whatever the model's defaults."""

    parameters: SamplingOptions = field(default_factory=SamplingOptions)
    logprobs: Annotated[int | None, Parameter(validator=Number(gte=0))] = None
    """Ask for the log-probability of each token and of this many most likely ones."""

    def params(self, **more: Any) -> SamplingParams:
        """Parameters for requests without HTTP; `more` are further fields.

        Raises ConfigError: a value is out of range, or needs a temperature.
        """
        given = self.parameters.body()
        drawn: dict[str, Any] = {"temperature": 0.0} | given
        try:
            params = SamplingParams(**drawn, logprobs=self.logprobs, **more).checked()
        except InvalidRequestError as error:
            raise ConfigError(f"--{_spelled(str(error), 1)}") from None
        if params.greedy:
            for name in DRAWS:
                if name in given and name != "temperature":
                    raise ConfigError(
                        f"--{_spelled(name)} needs --temperature above 0, such as 0.8: without it the most likely "
                        "token is taken."
                    )
        return params

    def record(self) -> dict[str, object]:
        """The parameters that were given, and the temperature; raises what `params` raises."""
        temperature = self.params().temperature
        return {"temperature": temperature} | self.parameters.body() | {"logprobs": self.logprobs}

    @property
    def summary(self) -> str:
        """Words for a table: `greedy`, or `temperature 0.8, top-p 0.95`."""
        params = self.params()
        words = ["greedy"] if params.greedy else [f"temperature {params.temperature:g}"]
        given = self.parameters.body()
        words += [f"{_spelled(name)} {given[name]:g}" for name in given if name != "temperature"]
        if self.logprobs is not None:
            words.append(f"{self.logprobs} log-probabilities")
        return ", ".join(words)


@Parameter(name="*", group=_GROUP)
@dataclass(frozen=True, kw_only=True)
class LoadSampling:
    """Sampling of all requests that servers are sent."""

    drawing: BenchSampling = field(default_factory=BenchSampling)
    sampling_seed: int | None = None
    """Seed of the drawn tokens, sent with every request; by default the server draws one."""
    explicit_sampling: bool = True
    """Send neutral top_p, top_k, min_p and repetition_penalty where none are given, so that no server applies its
    own; --no-explicit-sampling is for servers that do not know these fields."""

    def fields(self, endpoint: Endpoint) -> dict[str, object]:
        """Body fields of a request. Raises ConfigError: a value is out of range, or needs a temperature."""
        seed = {} if self.sampling_seed is None else {"seed": self.sampling_seed}
        params = self.drawing.params(**seed)
        body = dict(_NEUTRAL) if self.explicit_sampling else {}
        body |= {"temperature": params.temperature} | self.drawing.parameters.body() | seed
        if params.logprobs is not None and endpoint == "completions":
            body["logprobs"] = params.logprobs
        elif params.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": params.logprobs}
        return body

    def apply(self, samples: Iterable[Sample]) -> list[Sample]:
        """The same requests with these parameters; those that a request has already stay."""
        fields = {endpoint: self.fields(endpoint) for endpoint in ("completions", "chat")}
        return [
            Sample(sample.endpoint, {**fields[sample.endpoint], **sample.fields})
            for sample in samples
        ]

    def record(self) -> dict[str, object]:
        """Body fields of a completion; raises what `fields` raises."""
        return self.fields("completions")

    @property
    def summary(self) -> str:
        seed = "" if self.sampling_seed is None else f", seed {self.sampling_seed}"
        return self.drawing.summary + seed


def _spelled(name: str, count: int = -1) -> str:
    return name.replace("_", "-", count)
