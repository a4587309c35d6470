# SPDX-License-Identifier: Apache-2.0
"""The start of every process of a server with written answers: its worker says what a script says.

Tests of servers ask for what models of billions of parameters would answer. Here the served model computes as
ever; the token that goes on with the written answer to the prompt gets a bias that no other token comes near.
Grammars, parsers, streams and limits work as they do without. Other prompts get the model's own answers.

Python runs this file if its folder is in PYTHONPATH.
"""

from __future__ import annotations

import os
import sys

TOKENIZER = "PAGODA_PEERS_TOKENIZER"
"""The variable with the file tokenizer.json of the model; without it, nothing is written."""

if TOKENIZER in os.environ and "pagoda.worker.main" in getattr(sys, "orig_argv", ()):
    import written_answers

    written_answers.install(os.environ[TOKENIZER])
