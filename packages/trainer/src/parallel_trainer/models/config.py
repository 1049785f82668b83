"""Which models exist and what a file may ask of them, checked without importing MindSpore."""

from __future__ import annotations

from typing import Any

from parallel_trainer.models.deepseek_v3_config import DeepseekV3Config
from parallel_trainer.models.qwen3_config import Qwen3Config, Qwen3MoeConfig
from parallel_trainer.models.section import ModelConfig, UnsupportedModelError

__all__ = [
    "CONFIGS",
    "DeepseekV3Config",
    "ModelConfig",
    "Qwen3Config",
    "Qwen3MoeConfig",
    "UnsupportedModelError",
    "model_config",
]

CONFIGS: dict[str, type[ModelConfig]] = {
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "deepseek_v3": DeepseekV3Config,
}
"""By model_type. MindFormers has no qwen3_moe in its dynamic-graph mode: it is an extension."""


def model_config(section: Any) -> ModelConfig:
    """The configuration that `section.model_type` asks for.

    section: the `model` section of a file, or any object with its fields as attributes.
    Raises UnsupportedModelError for a model type that does not exist or that cannot do what the section says.
    """
    if section.model_type not in CONFIGS:
        raise UnsupportedModelError(
            f"model.model_type is {section.model_type!r}: there is no such model here; "
            f"it has to be one of {', '.join(map(repr, CONFIGS))}."
        )
    return CONFIGS[section.model_type].from_model_section(section)
