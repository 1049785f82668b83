"""The models, written once in terms of kernels, and the choice among them by `model_type`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parallel_trainer.models.config import DeepseekV3Config, ModelConfig, Qwen3Config, model_config
from parallel_trainer.models.initial import HUGGING_FACE

if TYPE_CHECKING:
    from parallel_trainer.kernels.interface import Kernels
    from parallel_trainer.models.layers import Model
    from parallel_trainer.parallel.context_parallel import Attention
    from parallel_trainer.parallel.expert_parallel import ExpertParallel
    from parallel_trainer.parallel.tensor_parallel import TensorParallel

__all__ = ["build_model"]


def build_model(
    section: Any,
    kernels: Kernels,
    *,
    attention: Attention | None = None,
    tp: TensorParallel | None = None,
    ep: ExpertParallel | None = None,
    initial_weights: str = HUGGING_FACE,
) -> Model:
    """The model that the `model` section of a file describes, with what a plan asks for; see `Qwen3`.

    section: as for `model_config`, or what that returned.
    Raises UnsupportedModelError (a ValueError) as `model_config` does.
    """
    config = section if isinstance(section, ModelConfig) else model_config(section)
    # Checking a file needs the configuration alone; MindSpore is imported when a model is built.
    if isinstance(config, DeepseekV3Config):
        from parallel_trainer.models.deepseek_v3 import DeepseekV3

        return DeepseekV3(config, kernels, attention=attention, tp=tp, ep=ep, initial_weights=initial_weights)
    from parallel_trainer.models.qwen3 import Qwen3

    assert isinstance(config, Qwen3Config)
    return Qwen3(config, kernels, attention=attention, tp=tp, ep=ep, initial_weights=initial_weights)
