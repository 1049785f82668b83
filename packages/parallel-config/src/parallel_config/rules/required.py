"""Fields that have no default and must be written where their section is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from parallel_config.problems import Problem
from parallel_config.rules.degrees import set_each
from parallel_config.rules.engine import Facts, Rule, rule

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def _architecture(facts: Facts) -> str:
    return ARCHITECTURES.get(facts.model.model_type or "", "Qwen3ForCausalLM")


def _model_type(facts: Facts) -> str:
    names = {architecture: name for name, architecture in ARCHITECTURES.items()}
    return names.get(facts.model.architectures or "", "qwen3")


def _required(path: str, section: str, example: Callable[[Facts], Any]) -> Rule:
    @rule(path, decides=(path,))
    def written(facts: Facts) -> Iterator[Problem]:
        if facts.wrote(section) and facts.value(path) in (None, ""):
            yield facts.problem(
                path,
                f"is required in section {section}",
                f"Write, for example, {path.rpartition('.')[2]}: {example(facts)}.",
                fixes=set_each(path, [example(facts)]),
            )

    return written


RULES = (
    _required("model.model_type", "model", _model_type),
    _required("model.architectures", "model", _architecture),
    _required("lr_scheduler.type", "lr_scheduler", lambda _: "ConstantWarmUpLR"),
    *(
        _required(f"{section}.dataloader.type", f"{section}.dataloader", lambda _: "BlendedMegatronDatasetDataLoader")
        for section in ("train_dataset", "eval_dataset")
    ),
    _required("eval_dataset.interval", "eval_dataset", lambda _: 100),
    _required("lora_config.target_modules", "lora_config", lambda _: ".*linear_qkv"),
)
