"""What the checks that ran in the ranks must have found."""

from __future__ import annotations

from typing import Any

import pytest

Reports = dict[int, dict[str, Any]]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_loss_is_the_mean_over_valid_tokens_of_the_global_batch(reports: Reports, world: int) -> None:
    found = reports[world]["checks"]["uneven_valid_tokens"]
    assert len(found) == 2 * {1: 1, 2: 2, 4: 3}[world]
    assert found == {layout: pytest.approx([2.5, 2.0, 12]) for layout in found}


def test_gradient_does_not_depend_on_layout_or_reduction(reports: Reports) -> None:
    found = reports[8]["checks"]["sum_or_average"]
    assert len(found) == 6
    assert found == pytest.approx(dict.fromkeys(found, 4.5))


def test_norm_counts_each_element_once(reports: Reports) -> None:
    expected = {"a": 10.0, "a_coefficient": 0.5, "b": 10.0, "c": 5.0, "spread": 0.0}
    assert reports[4]["checks"]["gradient_norms"] == pytest.approx(expected, rel=1e-6)


def test_weight_that_four_ranks_do_not_divide(reports: Reports) -> None:
    found = reports[4]["checks"]["uneven_shards"]
    assert found["gathered"] == [[10.0 * row + column for column in range(3)] for row in range(5)]
    assert found["elements_by_rank"] == [4, 4, 4, 3]
    assert found["gradient"] == [10.0] * 15
    assert found["norm"] == pytest.approx(38.7298335)
    assert found["freed_bytes"] == 0


@pytest.mark.parametrize(("name", "shards", "peak"), [("fsdp", 6 / 4, 2), ("hsdp", 6 / 2, 2), ("never", 6 / 4, 6)])
def test_rank_holds_its_shards_the_unit_that_runs_and_the_next(
    reports: Reports, name: str, shards: float, peak: int
) -> None:
    found = reports[4]["checks"]["memory"][name]
    assert found == {"shards": shards, "peak_gathered": peak, "left_gathered": 0}


def test_memory_of_gathered_weights_is_given_back(reports: Reports) -> None:
    # 20 passes gather each of 6 units twice; memory that is not given back shows as 240 units. What else a process
    # takes in that time depends on its allocator.
    assert reports[4]["checks"]["memory"]["growth"] < 60


@pytest.mark.parametrize("world", [2, 4])
def test_frozen_weight_has_no_gradient_and_changes_no_other(reports: Reports, world: int) -> None:
    found = reports[world]["checks"]["frozen_weights"]
    assert found["trainable"] == ["layer.0.w", "layer.2.w"]
    assert found["difference"] <= 1e-15 * found["largest"]
    assert found["state_elements"] == 2 * 7 * 7


@pytest.mark.parametrize(("world", "blocks"), [(2, [3, 2]), (4, [2, 1, 1, 1])])
def test_fused_weight_keeps_the_blocks_of_both_its_parts_together(
    reports: Reports, world: int, blocks: list[int]
) -> None:
    found = reports[world]["checks"]["fused_weights"]
    assert found["held"] == [2 * 4 * number for number in blocks]
    assert found["loss"] == pytest.approx(found["expected loss"], rel=1e-13)
    assert max(found["differences"].values()) < 1e-12


@pytest.mark.parametrize("world", [2, 4])
def test_narrow_weights_are_gathered_rounded_with_half_the_bytes_and_gradients_added_up_in_float32(
    reports: Reports, world: int
) -> None:
    found = reports[world]["checks"]["narrow_weights"]
    others = 8 * 16 * (world - 1) // world
    assert (found["bytes"]["float32"], found["bytes"]["bfloat16"]) == (4 * others, 2 * others)
    # bfloat16 has 8 bits.
    assert 2**-12 < found["largest rounding"] <= 2**-8
    assert found["gradients"] == [2048 + world - 1]


@pytest.mark.parametrize("world", [2, 4])
def test_narrow_hidden_states_travel_between_stages(reports: Reports, world: int) -> None:
    found = reports[world]["checks"]["narrow_stages"]
    assert found["loss"] == 2 * 8 * 6 * 1.5**world
    assert found["gradients"] == [2 * 1.5 ** (world - 1)] * world


def test_activations_are_freed_after_their_backward_and_never_more_than_the_schedule_has(reports: Reports) -> None:
    found = reports[4]["checks"]["live_activations"]
    assert {name: entry["peaks"] for name, entry in found.items()} == {
        # 4 ranks and 9 micro-batches in rounds of 5 and 4: 5 + 2 (3 - r) forwards ahead, min(p, m) and 2 p.
        "none": [12, 10, 8, 6],
        "zbh1": [4, 4, 4, 4],
        "zbv": [8, 8, 8, 8],
        "gpipe": [9, 9, 9, 9],
    }
    assert all(entry["peaks"] == entry["schedule"] for entry in found.values())
    assert all(entry["left"] == [0] * 4 for entry in found.values())
