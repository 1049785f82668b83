"""Masks the slow way: token by token, pair by pair."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

Bools = npt.NDArray[np.bool_]


def square(lengths: list[int]) -> Bools:
    """bool (S, S), True where the query sees the key, of one row of documents."""
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    size = len(document)
    return np.array([[k <= q and document[k] == document[q] for k in range(size)] for q in range(size)])


def picture(rows: list[str]) -> Bools:
    """The same from strings: # may attend, . may not."""
    return np.array([[sign == "#" for sign in row] for row in rows])


@st.composite
def batches(draw: st.DrawFn, multiple: int = 1, most: int = 24) -> list[list[int]]:
    """Document lengths of one to three rows of one sequence length, a multiple of `multiple`."""
    size = multiple * draw(st.integers(1, max(1, most // multiple)))
    cuts = st.sets(st.integers(1, size - 1), max_size=6) if size > 1 else st.just(set())
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        edges = [0, *sorted(draw(cuts)), size]
        rows.append([stop - start for start, stop in pairwise(edges)])
    return rows
