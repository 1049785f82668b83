"""One YAML file says how far a training run is split: check it, infer every degree, explain it."""

from __future__ import annotations

from parallel_config.document import Document
from parallel_config.effects import fields_without_effect
from parallel_config.explain import Explanation, explain
from parallel_config.home import expand_home, path_argument
from parallel_config.loading import load, loads
from parallel_config.notices import inert_fields
from parallel_config.plan import ParallelPlan, plan
from parallel_config.problems import ConfigError, ConfigWarning, Edit, Problem, UnsupportedConfigError
from parallel_config.repair import Repair, repairs
from parallel_config.schema import TrainConfig, written_fields
from parallel_config.source import read
from parallel_config.terminal import show_anywhere
from parallel_config.text_edits import LineEdit

__all__ = [
    "ConfigError",
    "ConfigWarning",
    "Document",
    "Edit",
    "Explanation",
    "LineEdit",
    "ParallelPlan",
    "Problem",
    "Repair",
    "TrainConfig",
    "UnsupportedConfigError",
    "expand_home",
    "explain",
    "fields_without_effect",
    "inert_fields",
    "load",
    "loads",
    "path_argument",
    "plan",
    "read",
    "repairs",
    "show_anywhere",
    "written_fields",
]
