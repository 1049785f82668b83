"""Experts over the ranks of every other dimension."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from attrs import evolve

from cases.case import Case
from cases.choosing import Draw
from cases.model import Model

_MODELS = (
    Model(architecture="qwen3_moe", experts=8, top_k=2, kv_heads=4),
    Model(architecture="qwen3_moe", experts=16, top_k=4, text="padded"),
    Model(architecture="deepseek_v3", experts=8, top_k=2),
    Model(architecture="deepseek_v3", experts=16, top_k=4, text="padded", tied=True),
    Model(architecture="deepseek_v3", experts=8, top_k=1, text="packed", mtp=1),
    Model(architecture="deepseek_v3", experts=16, top_k=2, text="plain", mtp=1, tied=True),
)
"""Where text is padded, half of all tokens are alike and go to the same few experts."""

_BALANCED = (
    Model(architecture="deepseek_v3", experts=16, top_k=4, layers=4, balance="aux_loss", local_batch=4),
    Model(architecture="qwen3_moe", kv_heads=4, layers=4, text="padded", balance="global_aux_loss", micro_batches=3),
)
"""Whose auxiliary loss depends on how a batch is cut, and on nothing else of a plan."""

_BALANCED_SPLITS: tuple[dict[str, Any], ...] = (
    {"dp_shard": 2, "ep": 2},
    {"tp": 2, "ep": 2},
    {"cp": 2, "tp": 2, "ep": 2},
    {"pp": 2, "chunks": 2, "dp_shard": 2, "ep": 2},
)

# The degrees that share the ranks of experts, and how many of them form a group of experts.
_SPLITS: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
    ({"dp_shard": 2}, (1, 2)),
    ({"dp_replicate": 2}, (1,)),
    ({"cp": 2}, (2,)),
    ({"tp": 2}, (1, 2)),
    ({"pp": 2}, (1,)),
    ({"dp_shard": 4}, (2, 4)),
    ({"dp_replicate": 2, "dp_shard": 2}, (2,)),
    ({"cp": 4}, (4,)),
    ({"tp": 4}, (2, 4)),
    ({"dp_shard": 2, "tp": 2}, (2, 4)),
    ({"cp": 2, "tp": 2}, (1, 2, 4)),
    ({"dp_shard": 2, "cp": 2}, (4,)),
    ({"pp": 2, "dp_shard": 2}, (2,)),
    ({"pp": 2, "tp": 2}, (2,)),
    ({"pp": 2, "cp": 2}, (2,)),
    ({"dp_shard": 2, "tp": 4}, (2, 8)),  # the specification's first example, and all ranks
    ({"dp_shard": 4, "tp": 2}, (4,)),  # its second, on half as many ranks
    ({"dp_shard": 8}, (8,)),
    ({"tp": 8}, (4, 8)),
    ({"cp": 8}, (8,)),
    ({"dp_shard": 2, "cp": 2, "tp": 2}, (4, 8)),
    ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, (4,)),
    ({"pp": 2, "dp_shard": 2, "tp": 2}, (4,)),
    ({"pp": 2, "cp": 2, "tp": 2}, (2,)),
)


def plans() -> Iterator[Case]:
    """Experts over every combination of the other dimensions, with the plain and the redundancy-free dispatcher."""
    draw = Draw(4)
    for degrees, groups in _SPLITS:
        world = math.prod(degrees.values())
        for ep in groups:
            nodes = (None, *(node for node in (2, 4) if node <= ep))
            # Eight ranks share two cores: they run one of these.
            for node in nodes if world < 8 else (draw((ep, "node"), *nodes),):
                model = draw((world, "model"), *_MODELS)
                if "pp" in degrees:
                    model = evolve(model, layers=4)
                yield Case(
                    **degrees,
                    ep=ep,
                    node=node,
                    chunks=2 if "pp" in degrees else 1,
                    accumulation=3 if "pp" in degrees else draw((world, "accumulation"), 1, 3),
                    method=draw("method", "colossal", "ulysses") if "cp" in degrees else "colossal",
                    asynchronous="cp" in degrees and draw("asynchronous", False, True),
                    order=draw("order", "contiguous", "zigzag") if "cp" in degrees else "contiguous",
                    loss_parallel="tp" in degrees and draw("loss_parallel", False, True),
                    paired="pp" in degrees and not node and draw("paired", False, True),
                    reduction=draw("reduction", "sum", "mean"),
                    reshard=draw("reshard", "default", "never"),
                    model=model,
                )
    for zero_bubble, chunks in (("zbh1", 1), ("zbv", 2)):
        yield Case(
            pp=2,
            dp_shard=2,
            ep=2,
            chunks=chunks,
            accumulation=3,
            zero_bubble=zero_bubble,
            model=evolve(_MODELS[-1], layers=4),
        )
    yield Case(dp_shard=2, ep=2, model=evolve(_MODELS[0], dtype="float32"))
    for model, reduction in zip(_BALANCED, ("sum", "mean"), strict=True):
        for degrees in _BALANCED_SPLITS:
            of_rank = model.batch // degrees.get("dp_shard", 1)
            micro_batches = of_rank // model.local_batch if model.local_batch else model.micro_batches
            yield Case(**degrees, accumulation=micro_batches, reduction=reduction, model=model)
