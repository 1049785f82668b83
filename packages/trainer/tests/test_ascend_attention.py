"""What Ascend's attention is told, turned back into a dense mask by what its documentation says, for every rank."""

from __future__ import annotations

from itertools import chain

import mindspore as ms
import numpy as np
import pytest
from ascend_operators import AscendOperators, seen
from mask_compression import CompressedMask, SequenceShard, causal, from_lengths
from mindspore import Tensor
from parallel_config import ParallelPlan
from parallel_trainer.kernels import kernels
from parallel_trainer.kernels.ascend.attention import operator_head_size
from parallel_trainer.parallel.sequence import attention_blocks

ASCEND = kernels("ascend")
SEQ_LENGTH = 32
MASKS = {
    "causal": causal(SEQ_LENGTH),
    "two causal rows": causal(SEQ_LENGTH, rows=2),
    "packed": from_lengths([3, 13, 1, 7, 8]),
    "one document longer than a rank's part": from_lengths([[1, 30, 1], [16, 16]]),
    "documents of one token": from_lengths([[1] * 32, [8] * 4]),
}
HEADS, KV_HEADS = 8, 4
# (context_parallel, ulysses_degree): colossal has degree 1, ulysses that of all ranks, hybrid one between.
DEGREES = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8)]


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> AscendOperators:
    found = AscendOperators(attends=False)
    found.install(monkeypatch)
    return found


def zeros(rows: int, tokens: int, heads: int, size: int = 4) -> Tensor:
    return Tensor(np.zeros((rows, tokens, heads, size), np.float32))


def told(arguments: dict[str, object]) -> np.ndarray:
    """bool (rows, queries, keys): which keys the operator was told that a query sees."""
    names = ("pre_tokens", "next_tokens", "actual_seq_qlen", "actual_seq_kvlen")
    query, key = arguments["query"], arguments["key"]
    options = {name: arguments[name] for name in names}
    if arguments["input_layout"] == "TND":
        return seen(arguments["sparse_mode"], query.shape[0], key.shape[0], **options)[None]
    one_row = seen(arguments["sparse_mode"], query.shape[1], key.shape[1], **options)
    return np.repeat(one_row[None], query.shape[0], axis=0)


def side_by_side(blocks: np.ndarray) -> np.ndarray:
    """(rows, queries, keys) as one mask of all rows, which do not see each other."""
    rows, queries, keys = blocks.shape
    whole = np.zeros((rows * queries, rows * keys), np.bool_)
    for row, block in enumerate(blocks):
        whole[row * queries : (row + 1) * queries, row * keys : (row + 1) * keys] = block
    return whole


def check_calls(operators: AscendOperators, mask: CompressedMask, positions: np.ndarray) -> None:
    """The calls see the rows of the dense mask at these positions, in ascending order."""
    first = 0
    for arguments in operators.arguments("flash_attention_score"):
        packed = arguments["input_layout"] == "TND"
        tokens = arguments["query"].shape[0] // mask.rows if packed else arguments["query"].shape[1]
        expected = mask.dense()[:, positions[first : first + tokens]]
        np.testing.assert_array_equal(told(arguments), side_by_side(expected)[None] if packed else expected)
        first += tokens
    assert first == len(positions)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("cp", "degree"), DEGREES)
def test_every_rank_sees_its_part_of_the_dense_mask(
    cp: int, degree: int, order: str, operators: AscendOperators
) -> None:
    method = "colossal" if degree == 1 else "ulysses" if degree == cp else "hybrid"
    plan = ParallelPlan.from_degrees(
        cp,
        context_parallel=cp,
        context_parallel_method=method,
        context_parallel_order=order,
        ulysses_degree_in_cp=degree if method == "hybrid" else None,
    )
    assert plan.ulysses_degree == degree
    blocks = attention_blocks(plan, SEQ_LENGTH)
    assert len(blocks) == cp // degree
    heads, kv_heads = HEADS // degree, max(1, KV_HEADS // degree)
    for mask in MASKS.values():
        keys = zeros(mask.rows, SEQ_LENGTH, kv_heads)
        for queries in blocks:
            operators.calls.clear()
            q = zeros(mask.rows, SEQ_LENGTH * degree // cp, heads)
            ASCEND.attention(q, keys, keys, 0.5, mask, query_ranges=queries, key_ranges=tuple(chain(*blocks)))
            calls = operators.arguments("flash_attention_score")
            assert len(calls) <= (1 if order == "contiguous" or len(blocks) == 1 else 2)
            assert {arguments["head_num"] for arguments in calls} == {heads}
            check_calls(operators, mask, np.sort(np.concatenate([np.arange(*piece) for piece in queries])))


def test_causal_parts_have_the_band_of_the_reference(operators: AscendOperators) -> None:
    # HyperParallel's operator: of n ranks with L queries each, rank r sees back Skv + (n-r-1)·L and ahead -(n-r-1)·L.
    ranks, own = 4, SEQ_LENGTH // 4
    for rank in range(ranks):
        (piece,) = SequenceShard(SEQ_LENGTH, ranks, rank).ranges
        keys = zeros(1, SEQ_LENGTH, 1)
        ASCEND.attention(zeros(1, own, 1), keys, keys, 0.5, causal(SEQ_LENGTH), query_ranges=(piece,))
        arguments = operators.arguments("flash_attention_score")[rank]
        behind = (ranks - rank - 1) * own
        assert (arguments["sparse_mode"], arguments["input_layout"]) == (4, "BSND")
        assert (arguments["pre_tokens"], arguments["next_tokens"]) == (SEQ_LENGTH + behind, -behind)


def test_a_document_that_a_rank_cuts_is_followed_by_an_entry_for_the_keys_behind(operators: AscendOperators) -> None:
    keys = zeros(1, 16, 2)
    ASCEND.attention(zeros(1, 4, 2), keys, keys, 0.5, from_lengths([5, 11]), query_ranges=((8, 12),))
    (arguments,) = operators.arguments("flash_attention_score")
    assert arguments["input_layout"] == "TND"
    # Without the last entry the second would end with key 16, and its queries would see keys 12 to 15.
    assert arguments["actual_seq_qlen"] == (0, 4, 4)
    assert arguments["actual_seq_kvlen"] == (5, 12, 16)
    assert arguments["query"].shape == (4, 2, 16)
    assert arguments["key"].shape == arguments["value"].shape == (16, 2, 16)


def test_tensors_have_the_form_that_the_operator_takes(operators: AscendOperators) -> None:
    q, k, v = zeros(2, 6, 4, 24), zeros(2, 6, 2, 24), zeros(2, 6, 2, 7)
    out = ASCEND.attention(q, k, v, 0.25, causal(6, rows=2))
    assert out.shape == (2, 6, 4, 7)
    assert out.dtype == ms.float32
    (arguments,) = operators.arguments("flash_attention_score")
    assert [arguments[name].dtype for name in ("query", "key", "value")] == [ms.bfloat16] * 3
    assert arguments["query"].shape == (2, 6, 4, 32)
    assert arguments["key"].shape == arguments["value"].shape == (2, 6, 2, 32)
    assert arguments["scalar_value"] == 0.25
    np.testing.assert_array_equal(arguments["attn_mask"].asnumpy(), ~np.tri(2048, dtype=np.bool_))
    assert ASCEND.attention(*(x.astype(ms.float16) for x in (q, k, v)), 0.25, causal(6, rows=2)).dtype == ms.float16
    assert operators.arguments("flash_attention_score")[1]["query"].dtype == ms.float16


@pytest.mark.parametrize(("sizes", "expected"), [((128, 128), 128), ((192, 128), 192), ((7, 3), 16), ((17, 33), 48)])
def test_heads_are_as_large_as_the_operator_takes(sizes: tuple[int, int], expected: int) -> None:
    assert operator_head_size(*sizes) == expected


def test_keys_of_parts_of_rows_are_refused(operators: AscendOperators) -> None:
    part = zeros(1, 8, 2)
    with pytest.raises(ValueError, match=r"keys are 8 positions of rows of 16; .*gather them first"):
        ASCEND.attention(part, part, part, 0.5, causal(16), query_ranges=((8, 16),), key_ranges=((8, 16),))
    assert not operators.calls


def test_more_documents_than_the_operator_takes_are_refused(operators: AscendOperators) -> None:
    rows = zeros(1, 1025, 1)
    with pytest.raises(ValueError, match=r"1025 documents.*at most 1024.*fewer rows"):
        ASCEND.attention(rows, rows, rows, 0.5, from_lengths([1] * 1025))
    assert not operators.calls
