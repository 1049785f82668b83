"""Reading masks: every form says the same documents, and none of them loses a boundary."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from mask_compression import CompressedMask, causal, eod_loss_mask, from_ends, from_lengths, from_tokens
from mask_compression.pallas import segment_ids
from mask_oracle import batches, square


@given(batches())
@settings(deadline=None)
def test_token_wise_forms(rows: list[list[int]]) -> None:
    mask = from_lengths(rows)
    size = sum(rows[0])
    positions = [[i for length in row for i in range(length)] for row in rows]
    ids = [[number for number, length in enumerate(row) for _ in range(length)] for row in rows]
    for form, expected in (
        (mask.position_ids(), positions),
        (mask.position_ids(reset=False), [list(range(size))] * len(rows)),
        (mask.segment_ids(), ids),
        (mask.document_starts(), np.arange(size) - np.array(positions)),
    ):
        assert form.dtype == np.int32
        np.testing.assert_array_equal(form, expected)


@given(batches())
@settings(deadline=None)
def test_document_wise_forms(rows: list[list[int]]) -> None:
    mask = from_lengths(rows)
    size, flat = sum(rows[0]), [length for row in rows for length in row]
    assert mask.lengths.tolist() == flat
    assert mask.cu_seqlens.tolist() == [0, *np.cumsum(flat)]
    assert mask.cu_seqlens.dtype == np.int32
    assert mask.starts.tolist() == mask.cu_seqlens[:-1].tolist()
    assert mask.document_rows.tolist() == [number for number, row in enumerate(rows) for _ in row]
    assert mask.total_tokens == size * len(rows)
    assert mask.visible_pairs == sum(square(row).sum() for row in rows)
    for number, row in enumerate(rows):
        assert mask.row_ends(number).tolist() == np.cumsum(row).tolist()
        assert mask.row_starts(number).tolist() == [0, *np.cumsum(row)[:-1]]
    np.testing.assert_array_equal(mask.flattened().dense()[0], square(flat))


@given(batches())
@settings(deadline=None)
def test_fixed_width_form_closes_every_row(rows: list[list[int]]) -> None:
    mask = from_lengths(rows)
    size, most = sum(rows[0]), max(map(len, rows))
    for width in (most, most + 1, 128):
        padded = mask.padded_ends(width)
        assert (padded.shape, padded.dtype) == ((len(rows), width), np.int32)
        assert padded.tolist() == [[*np.cumsum(row), *[size] * (width - len(row))] for row in rows]
        assert from_ends(padded) == mask


def test_fixed_width_form_of_the_documentation() -> None:
    mask = from_tokens([5, 0, 6, 7, 0, 8, 9, 9], eod=0)
    assert mask.padded_ends(4).tolist() == [[2, 5, 8, 8]]
    assert mask.padded_ends().shape == (1, 128)


def test_a_sample_with_as_many_boundaries_as_the_width_does_not_lose_the_closing_one() -> None:
    # Three EODs inside: MindFormers r2.0.0 gives [2, 4, 6] here, and the last two tokens belong to nothing.
    mask = from_tokens([5, 0, 6, 0, 7, 0, 8, 9], eod=0)
    assert mask.padded_ends(4).tolist() == [[2, 4, 6, 8]]
    with pytest.raises(ValueError, match=r"row 0 has 4 documents, but width \(eod_pad_length\) 3 .*at least 4"):
        mask.padded_ends(3)


def test_width_must_hold_the_fullest_row() -> None:
    with pytest.raises(ValueError, match=r"row 1 has 3 documents, but width \(eod_pad_length\) 2"):
        from_lengths([[4], [1, 2, 1], [2, 2]]).padded_ends(2)
    with pytest.raises(ValueError, match=r"width = 0 must be at least 1"):
        causal(4).padded_ends(0)


def test_loss_mask_is_0_where_the_input_is_eod() -> None:
    tokens = np.array([[5, 0, 6, 7], [0, 0, 8, 9]])
    loss = eod_loss_mask(tokens, eod=0)
    assert loss.dtype == np.int32
    assert loss.tolist() == [[1, 0, 1, 1], [0, 0, 1, 1]]
    assert eod_loss_mask([5, 0], eod=0).tolist() == [1, 0]


def test_zeros_written_for_padding_stay_with_their_sample() -> None:
    tokens = [5, 6, 0, 7]
    first = eod_loss_mask(tokens, eod=0)
    first[3:] = 0
    assert eod_loss_mask(tokens, eod=0).tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize(
    ("tokens", "eod", "error"), [([], 0, ValueError), ([1.5], 0, TypeError), ([1], -1, ValueError)]
)
def test_loss_mask_refuses_what_tokens_cannot_be(tokens: list[float], eod: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        eod_loss_mask(tokens, eod)


def test_forms_belong_to_the_caller() -> None:
    mask = causal(4)
    for form in (mask.position_ids(), mask.segment_ids(), mask.cu_seqlens, mask.padded_ends(2), mask.lengths):
        form[...] = 9
    assert mask == causal(4)
    assert mask.position_ids().tolist() == [[0, 1, 2, 3]]


def test_cu_seqlens_that_does_not_fit_32_bits() -> None:
    with pytest.raises(ValueError, match=r"int32, but the documents have 2147483648 tokens, more than 2147483647"):
        _ = CompressedMask(2, 2**30, np.array([2**30, 2**31])).cu_seqlens


@given(batches())
@settings(deadline=None)
def test_pallas_segment_ids_with_causal_are_the_mask(rows: list[list[int]]) -> None:
    mask, size = from_lengths(rows), sum(rows[0])
    for first, stop in {(0, size), (0, max(1, size // 2)), (size // 2, size)}:
        ids = segment_ids(mask, (first, stop))
        assert (ids.q.dtype, ids.kv.dtype) == (np.int32, np.int32)
        # What the kernels compute: equal ids, and the causal mask with the piece's start as offset.
        causal_part = np.arange(stop - first)[:, None] + first >= np.arange(size)
        seen = (ids.q[:, :, None] == ids.kv[:, None, :]) & causal_part
        np.testing.assert_array_equal(seen, np.stack([square(row) for row in rows])[:, first:stop])
    assert segment_ids(mask).q.shape == (len(rows), size)


def test_rows_that_are_not_there_are_refused() -> None:
    mask = from_lengths([[3, 5], [8]])
    for read in (mask.row_ends, mask.row_starts):
        for row in (-1, 2):
            with pytest.raises(ValueError, match=f"row {row} is outside the mask, which has rows 0 to 1"):
                read(row)
        with pytest.raises(TypeError, match=r"row must be a whole number, not 0\.5"):
            read(0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))])
def test_a_copy_is_equal_and_immutable(copied: Callable[[CompressedMask], CompressedMask]) -> None:
    mask = from_lengths([3, 5])
    again = copied(mask)
    assert again == mask
    assert hash(again) == hash(mask)
    assert not again.ends.flags.writeable
