"""Which model sections can be built, and that everything wrong with one is said at once."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from parallel_config import loads
from parallel_trainer.models.config import Qwen3Config, UnsupportedModelError, model_config

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def section(**fields):
    return SimpleNamespace(**{"model_type": "qwen3", "extra": {}, **SIZES, **fields})


def test_a_section_becomes_a_config_and_silent_fields_have_the_defaults_of_the_format():
    config = model_config(section(rope_theta=1e6, tie_word_embeddings=True, rms_norm_eps=None))
    assert config == Qwen3Config(**SIZES, rope_theta=1e6, tie_word_embeddings=True)
    assert (config.rms_norm_eps, config.initializer_range, config.attention_bias) == (1e-6, 0.02, False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "gelu"),
        ("normalization", "LayerNorm"),
        ("attention_dropout", 0.1),
        ("add_bias_linear", True),
        ("gated_linear_unit", False),
        ("multi_latent_attention", True),
        ("n_routed_experts", 8),
        ("num_experts", 8),
        ("num_nextn_predict_layers", 1),
    ],
)
def test_what_would_change_the_computation_is_refused(name, value):
    with pytest.raises(UnsupportedModelError, match=rf"model\.{name} is .*Qwen3 cannot do that here") as caught:
        model_config(section(**{name: value}))
    assert repr(value) in str(caught.value)


def test_fields_that_the_schema_does_not_list_are_seen_too():
    with pytest.raises(UnsupportedModelError, match="use_sliding_window is True"):
        model_config(section(extra={"use_sliding_window": True}))


def test_values_that_ask_for_what_is_computed_anyway_are_accepted():
    model_config(
        section(
            hidden_act="silu",
            normalization="RMSNorm",
            attention_dropout=0.0,
            add_bias_linear=False,
            gated_linear_unit=True,
            extra={"use_sliding_window": False},
        )
    )


def test_all_problems_come_at_once():
    with pytest.raises(ValueError, match="cannot be built as Qwen3") as caught:
        model_config(section(hidden_act="gelu", hidden_size=None, attention_dropout=0.5))
    assert [line.split(":")[0].split()[1] for line in str(caught.value).splitlines()[1:]] == [
        "model.hidden_size",
        "model.hidden_act",
        "model.attention_dropout",
    ]


def test_sizes_that_contradict_each_other_are_refused_with_sizes_that_work():
    with pytest.raises(UnsupportedModelError) as caught:
        model_config(section(num_key_value_heads=3, head_dim=7))
    message = str(caught.value)
    assert "num_key_value_heads is 3: it has to divide num_attention_heads 4; use one of 1, 2, 4." in message
    assert "head_dim is 7" in message
    assert "use 8" in message


def test_an_unknown_model_type_is_answered_with_those_that_exist():
    with pytest.raises(ValueError, match=r"model_type is 'llama'.*one of 'qwen3'"):
        model_config(SimpleNamespace(model_type="llama"))


def test_the_model_section_of_a_file_is_understood():
    sizes = "\n".join(f"  {name}: {value}" for name, value in SIZES.items())
    text = f"model:\n  model_type: qwen3\n  architectures: Qwen3ForCausalLM\n{sizes}\n  rope_theta: 1000000.0\n"
    assert model_config(loads(text).model) == Qwen3Config(**SIZES, rope_theta=1e6)


def test_checking_a_model_section_does_not_import_mindspore():
    program = (
        "import sys, parallel_trainer.models.config, parallel_trainer.launch.openblas\n"
        "sys.exit('mindspore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
