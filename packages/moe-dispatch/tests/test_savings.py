"""What sending a token to a node once saves: counted for simulated routers, against the formula and the README."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from moe_dispatch import ExpertLayout, RowsBetweenNodes, expected_nodes, rows_between_nodes

README = Path(__file__).parents[1] / "README.md"
EXPERTS, TOP_K, TOKENS = 256, 8, 4096


def simulate(nodes: int) -> tuple[float, float, float]:
    """Rows that leave a node for each of its tokens, as copies, once for a node, and gathered; the mean over nodes."""
    generator = np.random.default_rng(nodes)
    made = ExpertLayout(EXPERTS, nodes, ranks_per_node=1)
    counted = []
    for node in range(nodes):
        scores = generator.random((TOKENS, EXPERTS), np.float32)
        chosen = np.argpartition(scores, -TOP_K, axis=1)[:, -TOP_K:]
        rows = rows_between_nodes(chosen, made, node)
        counted.append((rows.copies, rows.once, rows.gathered))
    copies, once, gathered = np.mean(counted, axis=0) / TOKENS
    return float(copies), float(once), float(gathered)


@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
def test_the_table_of_the_readme(nodes: int) -> None:
    copies, once, gathered = simulate(nodes)
    formula = expected_nodes(EXPERTS, nodes, TOP_K) * (nodes - 1) / nodes
    assert once == pytest.approx(formula, rel=0.01)
    assert copies == pytest.approx(TOP_K * (nodes - 1) / nodes, rel=0.01)
    row = f"| {nodes} | {copies:.2f} | {once:.2f} | {formula:.3f} | {1 - once / copies:.0%} | {gathered:.0f} |"
    assert row.replace("%", " %") in README.read_text(encoding="utf-8")


@pytest.mark.parametrize(("experts", "nodes", "top_k"), [(6, 3, 2), (6, 2, 3), (4, 4, 1), (4, 1, 4), (6, 2, 6)])
def test_the_formula_counts_every_choice(experts: int, nodes: int, top_k: int) -> None:
    per_node = experts // nodes
    distinct = [len({e // per_node for e in chosen}) for chosen in combinations(range(experts), top_k)]
    assert expected_nodes(experts, nodes, top_k) == pytest.approx(sum(distinct) / len(distinct), rel=1e-15)


def test_no_tokens() -> None:
    made = ExpertLayout(8, 4, 2)
    assert rows_between_nodes(np.zeros((0, 2), np.int64), made, node=1) == RowsBetweenNodes(0, 0, 0)


@pytest.mark.parametrize("numbers", [(8, 3, 2), (8, 0, 2), (8, 2, 9), (8, 2, 0)])
def test_wrong_numbers(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"num_experts {numbers[0]}, num_nodes {numbers[1]}, top_k {numbers[2]}"):
        expected_nodes(*numbers)
