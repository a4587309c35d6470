# SPDX-License-Identifier: Apache-2.0
"""Evaluation harnesses: lm_eval with a log-likelihood task, inspect-ai with a schema."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import inspect_ai
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from inspect_ai.util import json_schema
from pydantic import BaseModel

from conftest import Server

_TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


def test_lm_eval_with_log_likelihoods(server: Server, tmp_path: Path) -> None:
    lines = [
        {"question": f"{n} + 1 =", "choices": [f" {n + 1}", f" {n + 5}"], "answer": 0}
        for n in range(8)
    ]
    data = tmp_path / "sums.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (tmp_path / "sums.yaml").write_text(_TASK.format(data=data), encoding="utf-8")
    model = [f"model={server.model}", f"base_url={server.v1}/completions", "num_concurrent=2"]
    model += ["tokenizer_backend=remote", "max_retries=1"]
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", ",".join(model), "--include_path", str(tmp_path)]
    command += ["--tasks", "sums", "--output_path", str(tmp_path / "out")]
    subprocess.run(command, check=True, timeout=240)
    [found] = (tmp_path / "out").rglob("results*.json")
    results = json.loads(found.read_text(encoding="utf-8"))["results"]["sums"]
    assert 0 <= results["acc,none"] <= 1


class User(BaseModel):
    name: str
    age: int


def test_inspect_with_a_schema(smollm2: Server, tmp_path: Path) -> None:
    schema = ResponseSchema(name="user", json_schema=json_schema(User), strict=True)
    model = get_model(
        f"openai-api/pagoda/{smollm2.model}",
        base_url=smollm2.v1,
        api_key="none",
        config=GenerateConfig(response_schema=schema, max_tokens=200, temperature=0),
    )
    task = inspect_ai.Task(
        dataset=[Sample(input="Extract: Jason is 25 years old.", target="Jason")],
        solver=generate(),
        scorer=includes(),
    )
    [log] = inspect_ai.eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success"
    assert User.model_validate_json(log.samples[0].output.completion).age == 25
    assert log.results.scores[0].metrics["accuracy"].value == 1
