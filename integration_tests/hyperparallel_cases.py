"""Which plans of the parity matrix the engine `hyperparallel` trains in its tests, as it can take them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from attrs import asdict, evolve
from cases import CASES, VOCAB_SIZE, Case
from parallel_config import TrainConfig, loads
from parallel_trainer.engines.hyperparallel.program import check
from parallel_trainer.errors import UserError

DRAWN = {2: 7, 4: 10}
MOST_LAYERS = 6
EVEN_VOCABULARY = 64
"""Which tensor parallelism can split: the matrix's own is odd, and stays whole on each rank."""

RECOMPUTED = (
    "recompute:\n  mode: full\n  full_recompute_layer: ['0-1']\nextensions: {initial_weights: megatron}\n",
    "recompute:\n  mode: select\n  select_module:\n    mlp: ['0-1']\n    self_attn: ['1']\n",
)


def drawn(world: int, corpora: Mapping[str, str]) -> dict[str, TrainConfig]:
    """Files of plans of so many ranks that the engine takes, by name; every third computes activations again, and
    starts with other weights or from the usual ones.

    Each is the one in which most pairs of choices meet for the first time, beginning with one of each schedule.
    """
    left = [_as_taken(case) for case in CASES if case.world == world and case.model.layers <= MOST_LAYERS]
    left = list(dict.fromkeys(case for case in left if case.zero_bubble == "none"))
    pairs = {case: set(itertools.combinations(_choices(case), 2)) for case in left}
    found: dict[str, TrainConfig] = {}
    met: set[object] = set()
    schedules: set[str] = set()
    while left and len(found) < DRAWN[world]:
        best = max(left, key=lambda case: (case.schedule not in schedules, len(pairs[case] - met)))
        left.remove(best)
        counts_on = best.model.balance == "global_aux_loss"  # from micro-batch to micro-batch
        again = RECOMPUTED[len(found) // 3 % 2] if counts_on or len(found) % 3 == 2 else ""
        text = best.yaml(corpora)
        if best.tp > 1 and len(found) % 2 == 0:
            text = text.replace(f"vocab_size: {VOCAB_SIZE}", f"vocab_size: {EVEN_VOCABULARY}")
        config = loads(text + again)
        if _is_taken(config, world):
            parts = [best.name, *(["even-vocabulary"] if config.model.vocab_size == EVEN_VOCABULARY else [])]
            found["-".join([*parts, *([f"recompute-{config.recompute.mode}"] if again else [])])] = config
            met |= pairs[best]
            schedules.add(best.schedule)
    return found


def _as_taken(case: Case) -> Case:
    """The nearest case without what the engine refuses."""
    model = evolve(case.model, dtype="float32", tied=False, mtp=case.model.mtp if case.pp == 1 else 0)
    return evolve(
        case,
        order="contiguous",
        reduction="sum",
        asynchronous=case.asynchronous and case.method != "colossal",
        model=model,
    )


def _choices(case: Case) -> Iterator[tuple[str, object]]:
    for name, value in asdict(case, recurse=False).items():
        if name == "model":
            yield from asdict(value).items()
        elif name not in ("method", "ulysses") or case.cp > 1:
            yield name, value


def _is_taken(config: TrainConfig, world: int) -> bool:
    try:
        check(config, world)
    except UserError:
        return False
    return True
