"""The parity matrix: which plans are trained and what each must equal. A file for each dimension."""

from __future__ import annotations

from pathlib import Path

from cases import context_parallel, data_parallel, expert_parallel, pipeline, tensor_parallel
from cases.case import EOD, PAD, SEQ_LENGTH, STEPS, TOLERANCE, VOCAB_SIZE, WORLDS, Case, corpora
from cases.model import GLOBAL_BATCH, Model

__all__ = [
    "BASELINES",
    "CASES",
    "EOD",
    "GLOBAL_BATCH",
    "PAD",
    "SCENARIOS",
    "SCENARIO_STEPS",
    "SEQ_LENGTH",
    "STEPS",
    "TOLERANCE",
    "VOCAB_SIZE",
    "WORLDS",
    "Case",
    "Model",
    "corpora",
]

_DIMENSIONS = (data_parallel, context_parallel, tensor_parallel, pipeline, expert_parallel)
CASES = tuple(dict.fromkeys(case for dimension in _DIMENSIONS for case in dimension.plans()))
BASELINES = tuple({case.model: None for case in CASES})
SCENARIOS = sorted((Path(__file__).parents[2] / "docs" / "scenarios" / "specification").glob("*.yaml"))
"""The specification's, for eight ranks."""
SCENARIO_STEPS = 3
"""Their learning rates begin at 0."""
