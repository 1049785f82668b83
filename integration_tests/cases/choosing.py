"""Choices where all combinations are too many: drawn, or such that every two meet."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any


def splits(ranks: int) -> list[tuple[int, int]]:
    """Every (dp_replicate, dp_shard) of so many ranks."""
    return [(ranks // shard, shard) for shard in range(1, ranks + 1) if ranks % shard == 0]


class Draw:
    """Values in a random order that is the same in every run, each equally often: choices that must not go in step."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._decks: dict[Any, list[Any]] = {}

    def __call__(self, name: object, *values: Any) -> Any:
        """The next value of the deck `name`."""
        if not self._decks.get(name):
            self._decks[name] = self._random.sample(values, len(values))
        return self._decks[name].pop()


class Meetings:
    """Chooses values such that every value of one name meets every value of every other name, after few calls."""

    def __init__(self) -> None:
        self._met: Counter[tuple[object, ...]] = Counter()

    def __call__(self, fixed: Mapping[str, object], **options: Sequence[object]) -> dict[str, Any]:
        """One value for each of `options`: those that make most pairs for the first time, with the fixed ones too."""
        candidates = [dict(zip(options, chosen, strict=True)) for chosen in itertools.product(*options.values())]

        def merit(chosen: dict[str, object]) -> tuple[int, int]:
            met = [self._met[pair] for pair in _pairs({**fixed, **chosen})]
            return met.count(0), -sum(met)

        best = max(candidates, key=merit)
        self._met.update(_pairs({**fixed, **best}))
        return best


def _pairs(values: Mapping[str, object]) -> Iterator[tuple[object, ...]]:
    return itertools.combinations(values.items(), 2)
