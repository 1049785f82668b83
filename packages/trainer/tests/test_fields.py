"""What the schema declares of a field's effect, held against what reads the field."""

from __future__ import annotations

import ast
from pathlib import Path

import parallel_config
import parallel_trainer
import pytest
from attrs import fields
from parallel_config.effects import all_fields
from parallel_config.schema import Model
from parallel_config.schema.model import MODEL_EXTRAS
from parallel_config.schema.setting import MODEL_TYPES
from parallel_trainer.models.config import CONFIGS

DONE_ANYWAY = {
    "checkpoint.load_balanced",
    "checkpoint.remove_redundancy",
    "parallelism.context_parallel_mask_type",
    "training.deterministic",
}
"""Fields whose every value that passes the check is what a run does without looking."""

OTHER_MEANING = {
    "callbacks[].type",
    "context.device_target",
    "monitor.tensorboard.output_dir",
    "profiler.end_step",
    "swap.layer_swap[].layers",
    "swap.op_swap[].layers",
}
"""Fields without effect, whose names something else has too."""


def names(package: str, *but: str) -> tuple[set[str], set[str]]:
    """Attributes that a package's source uses, and the ends of dotted texts in it; without these folders and files."""
    attributes, texts = set(), set()
    for path in Path(package).parent.rglob("*.py"):
        if any(part in path.parts for part in but):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                attributes.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value.rpartition(".")[2])
                if node.value.startswith("_"):  # the end of f"{split}_data_path"
                    texts |= {f"{split}{node.value}" for split in ("train", "valid", "test")}
            elif isinstance(node, ast.keyword | ast.arg):
                texts.add(node.arg or "")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                texts.add(node.target.id)  # a field of a model's configuration
    return attributes, texts


@pytest.fixture(scope="module")
def native() -> tuple[set[str], set[str]]:
    """What the trainer reads, without the other engine and the start-up line, which refuses fields by name."""
    return names(parallel_trainer.__file__, "hyperparallel", "run_mindformer.py")


def test_what_claims_an_effect_is_read(native: tuple[set[str], set[str]]) -> None:
    checked = names(parallel_config.__file__, "setting.py", "effects.py", "reference.py", "migrate")
    read = native[0] | native[1] | checked[0]
    for field in all_fields().values():
        refused_with_its_section = field.path.startswith("lora_config.")
        if "native" in field.effect.engines and field.path not in DONE_ANYWAY and not refused_with_its_section:
            assert field.path.rpartition(".")[2] in read, f"{field.path} claims an effect, and nothing reads it"


def test_what_claims_none_is_not_read(native: tuple[set[str], set[str]]) -> None:
    claimed = {field.path.rpartition(".")[2] for field in all_fields().values() if "native" in field.effect.engines}
    for field in all_fields().values():
        name = field.path.rpartition(".")[2]
        if "native" not in field.effect.engines and name not in claimed and field.path not in OTHER_MEANING:
            assert name not in native[0], f"{field.path} claims no effect, and something reads it"


@pytest.mark.parametrize(
    ("module", "engine"),
    [("support.py", "native"), ("support.py", "hyperparallel"), ("engines/hyperparallel/refusals.py", "hyperparallel")],
)
def test_what_an_engine_refuses_it_claims_to_act_on(module: str, engine: str) -> None:
    source = Path(parallel_trainer.__file__).parent.joinpath(module).read_text(encoding="utf-8")
    constants = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    refused = [text for text in constants if isinstance(text, str) and text in all_fields()]
    assert len(refused) > 3
    for path in refused:
        assert engine in all_fields()[path].effect.engines, f"{path} is refused, and claims to be ignored"


def test_exceptions_are_needed() -> None:
    assert all_fields().keys() >= DONE_ANYWAY | OTHER_MEANING


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_model_acts_on_the_fields_that_are_declared_for_it(kind: str) -> None:
    declared = {name.name for name in fields(Model)} - {"extra"}
    acted_on = CONFIGS[kind].acted_on()
    of_this_model = {
        path.removeprefix("model.")
        for path, field in all_fields().items()
        if path.startswith("model.") and kind in field.effect.models and field.effect.engines
    }
    of_every_run = {
        *("model_type", "architectures", "seq_length", "params_dtype", "compute_dtype", "pad_token_id"),
        *("use_flash_attention", "use_attn_mask_compression", "use_eod_attn_mask_compression"),
        "calculate_per_token_loss",
    }
    assert of_this_model - of_every_run == acted_on & declared
    assert set(MODEL_EXTRAS[kind]) == acted_on - declared


def test_the_models_are_those_that_the_schema_names() -> None:
    assert tuple(CONFIGS) == MODEL_TYPES
