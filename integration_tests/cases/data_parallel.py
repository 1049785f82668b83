"""FSDP and HSDP alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from cases.case import WORLDS, Case
from cases.choosing import Draw, splits
from cases.model import Model


def plans() -> Iterator[Case]:
    """Every split with every reshard policy, one micro-batch and several; reductions and tied heads are drawn."""
    draw = Draw(0)
    for split in itertools.chain.from_iterable(map(splits, WORLDS)):
        # Eight ranks share two cores: they run one number of micro-batches, or the other.
        numbers = (1, 3) if math.prod(split) < 8 else (draw("micro-batches", 1, 3),)
        for reshard, accumulation in itertools.product(("always", "never", "default"), numbers):
            yield Case(
                *split,
                reduction=draw((reshard, "reduction"), "sum", "mean"),
                reshard=reshard,
                accumulation=accumulation,
                model=Model(tied=draw((reshard, "tied"), False, False, True)),
            )
        if math.prod(split) < 8:  # rounding is the same on eight ranks as on four, and they share two cores
            yield Case(*split, accumulation=draw("accumulation", 1, 3), model=Model(dtype="float32"))
