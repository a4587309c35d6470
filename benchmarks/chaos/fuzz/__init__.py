# SPDX-License-Identifier: Apache-2.0
"""Fuzzing of everything that Pagoda reads: files, bodies and frames.

`targets.TARGETS` lists what is fuzzed. `child` fuzzes one target in a process with bounds of time and memory,
guided by coverage where atheris is installed. `tests/fuzz/corpus` keeps the inputs, which `make test` replays.
"""
