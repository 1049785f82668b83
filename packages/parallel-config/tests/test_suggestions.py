"""What the sentence of a problem offers: made in the file, it leaves no problem."""

from __future__ import annotations

import itertools
import re
from random import Random
from typing import Any

import pytest
from parallel_config import read
from parallel_config.document import Document
from parallel_config.loading import examine
from parallel_config.problems import Problem

SIZES: dict[str, dict[str, tuple[Any, ...]]] = {
    "parallelism": {
        "tensor_parallel": (2, 3, 4, 6, 8),
        "context_parallel": (1, 1, 2, 3),
        "context_parallel_method": ("colossal", "ulysses"),
        "context_parallel_order": ("contiguous", "zigzag"),
    },
    "model": {
        "num_attention_heads": (6, 8, 12),
        "num_key_value_heads": (1, 2, 3, 4),
        "intermediate_size": (24, 16, 10),
        "vocab_size": (2, 3, 50),
        "seq_length": (24, 16),
        "q_lora_rank": (0, 16, 16, 16),
    },
}
REST = {"model_type": "qwen3", "architectures": "X", "use_attn_mask_compression": True, "num_hidden_layers": 2}
WORLDS = (None, 4, 6, 8, 12)


def random_files(count: int) -> list[tuple[int | None, dict[str, dict[str, Any]]]]:
    random = Random(0)
    found = []
    for _ in range(count):
        values = {
            section: {name: random.choice(choices) for name, choices in fields.items()}
            for section, fields in SIZES.items()
        }
        values["model"] |= REST
        # Heads that their groups do not divide are a fault of their own, said when the heads are right.
        if values["model"]["num_attention_heads"] % values["model"]["num_key_value_heads"] == 0:
            found.append((random.choice(WORLDS), values))
    return found


def problems(values: dict[str, dict[str, Any]], world_size: int | None) -> tuple[Problem, ...]:
    return examine(Document.from_values(values), world_size).problems


def offers(sentence: str) -> list[dict[str, int]]:
    """The fields that "Use a 1, 2 or 3; or b 4, c 5." offers together; a world size is no field."""
    found: list[dict[str, int]] = []
    name = ""
    for part in re.split(r"; or | or |, (?=\d)", sentence.split("a world size")[0].removesuffix(".")):
        fields = re.findall(r"([a-z_]+) (\d+)", part)
        if part.isdigit():
            found.append({name: int(part)})
        elif fields:
            name = fields[-1][0]
            found.append({field: int(value) for field, value in fields})
    return found


def test_how_offers_are_read() -> None:
    read_out = offers("Use a 1, 2 or 3; or b 4, c 5 or d 6 or more; or a world size of 7.")
    assert read_out == [{"a": 1}, {"a": 2}, {"a": 3}, {"b": 4, "c": 5}, {"d": 6}]


def test_what_a_sentence_offers_leaves_no_problem() -> None:
    sections = {name: section for section, fields in SIZES.items() for name in fields} | {
        "pipeline_parallel": "parallelism"
    }
    refused, tried, rules = [], 0, set()
    for world_size, values in random_files(4000):
        found = problems(values, world_size)
        if len(found) != 1:
            continue
        rules.add((found[0].path, re.sub(r"\d+", "", found[0].rule)))
        for offer in (offer for offer in offers(found[0].suggestion) if set(offer) <= set(sections)):
            changed = {section: dict(fields) for section, fields in values.items()}
            for name, value in offer.items():
                changed[sections[name]][name] = value
            tried += 1
            left = problems(changed, world_size)
            if left:
                refused.append(f"{found[0]}\n    {offer}: {left[0]}")
    assert not refused, f"{len(refused)} of {tried}:\n" + "\n".join(refused[:5])
    assert len(rules) >= 8
    assert tried >= 500


@pytest.mark.parametrize(
    ("world_size", "parallelism", "refused"),
    [
        # 3 ranks cannot share 8 heads, though 3 divides the world.
        (3, "tensor_parallel: 2", "tensor_parallel 3"),
        # 5 ranks cannot hold a vocabulary of 4.
        (5, "tensor_parallel: 4", "tensor_parallel 5"),
        # 32 tokens cannot be cut into 3 parts.
        (6, "context_parallel: 4", "context_parallel 3"),
    ],
)
def test_degrees_that_share_out_the_world_and_not_the_model_are_not_offered(
    world_size: int, parallelism: str, refused: str
) -> None:
    model = "num_attention_heads: 8, num_key_value_heads: 8, intermediate_size: 40, vocab_size: 4, seq_length: 32"
    text = f"parallelism: {{{parallelism}}}\nmodel: {{model_type: qwen3, architectures: X, {model}}}"
    found = [problem for problem in examine(read(text, "a.yaml"), world_size).problems if "world_size" in problem.rule]
    assert len(found) == 1
    assert refused not in found[0].suggestion
    shown = list(itertools.chain.from_iterable(map(dict.items, offers(found[0].suggestion))))
    assert shown
