"""Tensor parallelism beside FSDP or HSDP, and beside context parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from cases.case import WORLDS, Case
from cases.choosing import Draw, splits
from cases.model import TEXTS, Model


def plans() -> Iterator[Case]:
    """Every degree and both kinds of logits on every split of the ranks, then crossed with context parallelism."""
    draw = Draw(2)
    for world in WORLDS:
        for tp in (size for size in (2, 4, 8) if world % size == 0):
            for split, loss_parallel in itertools.product(splits(world // tp), (False, True)):
                # Two key/value heads and eight ranks: four hold the same one. Eight of eight: every number of heads.
                every = [((number + loss_parallel) % 2 == 1, heads) for number, heads in enumerate((2, 4, 8))]
                drawn = [
                    (draw((tp, "tied"), False, True), draw((tp, loss_parallel, "kv_heads"), 2, 4, 8)) for _ in range(3)
                ]
                for tied, kv_heads in every if tp == 8 else drawn[: 1 if world == 8 else 2]:
                    yield Case(
                        *split,
                        tp=tp,
                        loss_parallel=loss_parallel,
                        reduction=draw("reduction", "sum", "mean"),
                        reshard=draw("reshard", "default", "never"),
                        accumulation=draw("accumulation", 1, 3),
                        model=Model(tied=tied, kv_heads=kv_heads, bias=draw("bias", False, False, True)),
                    )
                if split[0] == 1 and world < 8:
                    yield Case(*split, tp=tp, loss_parallel=loss_parallel, model=Model(dtype="float32"))
    for cp, tp, split in ((2, 2, (1, 1)), (2, 2, (1, 2)), (2, 2, (2, 1)), (4, 2, (1, 1)), (2, 4, (1, 1))):
        hybrid = [("hybrid", 2)] if cp == 4 else []
        for (method, inner), asynchronous in itertools.product(
            [("colossal", None), ("ulysses", None), *hybrid], (False, True)
        ):
            yield Case(
                *split,
                cp,
                tp,
                method,
                inner,
                asynchronous,
                order=draw("order", "contiguous", "zigzag"),
                loss_parallel=draw("loss_parallel", False, True),
                reduction=draw("crossed reduction", "sum", "mean"),
                reshard=draw("crossed reshard", "default", "never"),
                accumulation=draw("crossed accumulation", 1, 3),
                model=Model(
                    text=draw("text", *TEXTS),
                    kv_heads=draw("crossed kv_heads", 2, 4, 8),
                    tied=draw("tied", False, True),
                ),
            )
