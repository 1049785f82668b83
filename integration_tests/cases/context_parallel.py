"""Context parallelism beside FSDP or HSDP."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from attrs import evolve

from cases.case import WORLDS, Case
from cases.choosing import Draw
from cases.model import TEXTS, Model


def plans() -> Iterator[Case]:
    """Every method, asynchronous or not, on every split of the ranks; the other choices are drawn."""
    draw = Draw(1)
    for world in WORLDS:
        for cp in (size for size in (2, 4, 8) if world % size == 0):
            replicas = {(world // cp, 1), (1, world // cp)}
            hybrids = [("hybrid", inner) for inner in (2, 4) if inner < cp]
            methods = [("colossal", None), ("ulysses", None), *hybrids]
            for split, (method, inner), asynchronous in itertools.product(sorted(replicas), methods, (False, True)):
                case = Case(*split, cp, method=method, ulysses=inner, asynchronous=asynchronous)
                # Eight ranks share two cores: they run every second of these once.
                runs = 2 if world < 8 else int(cp == 8 or draw((cp, "split"), True, False))
                for _ in range(runs):
                    text = draw((world, asynchronous, "text"), *TEXTS)
                    order = draw((world, text, "order"), "contiguous", "zigzag")
                    yield evolve(
                        case,
                        order=order,
                        reduction=draw((world, order, "reduction"), "sum", "mean"),
                        reshard=draw("reshard", "default", "never"),
                        accumulation=draw("accumulation", 1, 3),
                        model=Model(
                            text=text,
                            kv_heads=draw("kv_heads", 2, 4, 8),
                            tied=draw("tied", False, False, True),
                        ),
                    )
                if split[0] == 1 and world < 8:
                    yield evolve(case, model=Model(dtype="float32", text="packed"))
