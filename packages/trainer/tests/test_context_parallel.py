"""Cutting a batch for context parallelism, and the balance of attention: what needs one process only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from late_groups import LateMirror, Note, Noted
from mask_compression import from_lengths
from mindspore import Tensor, nn, ops
from parallel_config import ParallelPlan, loads
from parallel_trainer.balance import attention_work
from parallel_trainer.batch import MicroBatch, look_ahead
from parallel_trainer.cli import main
from parallel_trainer.data.indexed import IndexedWriter
from parallel_trainer.data.sample import make_sample, stack
from parallel_trainer.data.settings import SampleSettings
from parallel_trainer.job import prepare
from parallel_trainer.kernels import kernels
from parallel_trainer.parallel.context_parallel import LocalAttention, UlyssesAttention, cut, repeat_heads
from parallel_trainer.parallel.sequence import OF, shards


def pieces(batch: MicroBatch, **degrees: object) -> list[MicroBatch]:
    plan = ParallelPlan.from_degrees(2, context_parallel=2, **degrees)  # type: ignore[arg-type]
    return [cut(batch, shard) for shard in shards(plan, batch.input_ids.shape[1])]


def test_pub_cp_03_labels_are_shifted_before_the_sequence_is_cut() -> None:
    """PUB-CP-03."""
    raw = np.array([11, 12, 13, 14, 15, 16, 17, 18, 19])
    rank0, rank1 = pieces(stack([make_sample(raw, SampleSettings(seq_length=8, eod=14, eod_mask_loss=True))]))
    assert rank0.input_ids.tolist() == [[11, 12, 13, 14]]
    assert rank0.labels.tolist() == [[12, 13, 14, 15]]
    assert rank0.loss_mask.tolist() == [[1, 1, 1, 0]]
    assert rank1.input_ids.tolist() == [[15, 16, 17, 18]]
    assert rank1.labels.tolist() == [[16, 17, 18, 19]]
    assert rank1.loss_mask.tolist() == [[1, 1, 1, 1]]
    assert rank0.valid_tokens() + rank1.valid_tokens() == 7


def test_pub_cp_02_a_document_that_crosses_the_cut_keeps_its_positions_and_its_keys() -> None:
    """PUB-CP-02, in the trainer."""
    tokens = np.full(17, 9)
    tokens[[4, 11, 15]] = 0
    settings = SampleSettings(seq_length=16, eod=0, reset_position_ids=True, separate_documents=True)
    rank0, rank1 = pieces(stack([make_sample(tokens, settings)]))
    assert rank0.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert rank1.position_ids.tolist() == [[3, 4, 5, 6, 0, 1, 2, 3]]
    # The mask stays that of the whole row, so no boundary is counted from a rank's own first token.
    assert rank0.mask == rank1.mask == from_lengths([[5, 7, 4]])


def test_zigzag_gives_each_rank_an_early_and_a_late_piece() -> None:
    ids = np.arange(16).reshape(2, 8)
    rank0, rank1 = pieces(MicroBatch(ids, ids), context_parallel_order="zigzag")
    assert rank0.input_ids.tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert rank1.input_ids.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]


def test_what_is_ahead_is_found_before_the_sequence_is_cut() -> None:
    raw = np.array([11, 12, 13, 14, 15, 16, 17, 18, 19])
    whole = look_ahead(stack([make_sample(raw, SampleSettings(seq_length=8, eod=14, eod_mask_loss=True))]))
    rank0, rank1 = pieces(whole)
    assert rank0.ahead.input_ids.tolist() == [[12, 13, 14, 15]]
    assert rank0.ahead.labels.tolist() == [[13, 14, 15, 16]]
    assert rank0.ahead.loss_mask.tolist() == [[1, 1, 0, 1]]
    assert rank1.ahead.input_ids.tolist() == [[16, 17, 18, 0]]
    assert rank1.ahead.labels.tolist() == [[17, 18, 19, 0]]
    assert rank1.ahead.loss_mask.tolist() == [[1, 1, 1, 0]]
    for part in (rank0, rank1):
        assert part.ahead.position_ids.tolist() == part.position_ids.tolist()
        assert part.ahead.mask is part.mask
    assert whole.counts(2).tolist() == [7, 6]
    assert (rank0.counts(2) + rank1.counts(2)).tolist() == [7, 6]
    assert whole.counts(1).tolist() == [7]


def test_without_a_loss_mask_all_but_the_last_are_ahead() -> None:
    ids = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    batch = look_ahead(MicroBatch(ids, ids, np.array([[2, 3, -100], [5, 6, 7]], np.int32)))
    assert batch.ahead is not None
    assert batch.ahead.loss_mask.tolist() == [[1, 1, 0], [1, 1, 0]]
    assert batch.counts(2).tolist() == [5, 3]


def test_nothing_is_ahead_of_the_last_token_of_a_document_that_is_kept_apart() -> None:
    ids = np.array([[5, 6, 7, 0, 8, 0], [9, 0, 1, 1, 1, 1]], np.int32)
    labels = np.array([[6, 7, 0, 8, 0, 9], [0, 1, 1, 1, 1, 1]], np.int32)
    apart = from_lengths([[4, 2], [2, 4]])
    batch = look_ahead(MicroBatch(ids, ids, labels, mask=apart))
    assert batch.ahead is not None
    assert batch.ahead.loss_mask.tolist() == [[1, 1, 1, 0, 1, 0], [1, 0, 1, 1, 1, 0]]
    assert batch.mask is apart


class OnTheirWay(nn.Cell):
    """Ulysses of one tensor, from which queries, keys and values are made one after the other."""

    def __init__(self, attention: UlyssesAttention, note: Note) -> None:
        super().__init__()
        self._attention, self._note = attention, note

    def construct(self, x: Tensor) -> Tensor:
        q, k, v = (self._attention.bring(Noted.apply(x, self._note, of), of) for of in OF)
        return self._attention(q(), k(), v(), scale=1.0, mask=from_lengths([[4]]))


@pytest.mark.parametrize("under_way", [True, False])
def test_queries_travel_while_keys_and_values_are_made(under_way: bool) -> None:
    """What is read before it has come is not a number."""
    events: list[str] = []
    inner = LocalAttention(kernels("cpu"))
    cell = OnTheirWay(UlyssesAttention(LateMirror(events.append), inner, under_way=under_way), events.append)  # type: ignore[arg-type]
    cell.set_grad()
    x = Tensor(np.random.default_rng(0).standard_normal((1, 2, 2, 3)))
    out = cell(x)
    (gradient,) = ops.GradOperation(get_all=True, sens_param=True)(cell)(x, out)
    assert np.isfinite(out.asnumpy()).all()
    assert np.isfinite(gradient.asnumpy()).all()
    whole = ["send", "arrived"]
    if under_way:
        there = ["q", "send", "k", "send", "v", "send", "arrived", "arrived", "arrived"]
        back = [*["send"] * 3, "arrived", "v backward", "arrived", "k backward", "arrived", "q backward"]
    else:
        there = ["q", *whole, "k", *whole, "v", *whole]
        back = [*whole, "v backward", *whole, "k backward", *whole, "q backward"]
    assert events == [*there, *whole, *whole, *back]


def test_copied_heads_sum_their_gradients() -> None:
    x = Tensor(np.arange(4.0).reshape(1, 1, 2, 2))
    repeated = repeat_heads(x, 3)
    assert repeated.asnumpy().tolist() == [[[[0, 1]] * 3 + [[2, 3]] * 3]]
    weights = np.arange(12.0).reshape(1, 1, 6, 2)
    gradient = ops.GradOperation(sens_param=True)(lambda x: repeat_heads(x, 3))(x, Tensor(weights))
    assert gradient.asnumpy().tolist() == [[[[0 + 2 + 4, 1 + 3 + 5], [6 + 8 + 10, 7 + 9 + 11]]]]


CONFIG = """
parallelism: {{context_parallel: {cp}, context_parallel_method: {method}, ulysses_degree_in_cp: {ulysses}}}
training: {{steps: 2, global_batch_size: 2, local_batch_size: 1}}
model:
  model_type: qwen3
  architectures: Qwen3ForCausalLM
  vocab_size: 64
  seq_length: 16
  hidden_size: 16
  intermediate_size: 32
  num_hidden_layers: 1
  num_attention_heads: 4
  num_key_value_heads: 2
lr_scheduler: {{type: ConstantWarmUpLR, learning_rate: 1.0e-3, warmup_steps: 0}}
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [4, 0, 0]
    config:
      data_path: ["{corpus}"]
      split: "1, 0, 0"
      seq_length: 16
      eod: 0
      create_attention_mask: false
      create_compressed_eod_mask: true
"""


def config(corpus: str, method: str = "colossal", ulysses: str = "null") -> str:
    return CONFIG.format(cp=4, corpus=corpus, method=method, ulysses=ulysses)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """Documents of eight tokens: two in every sample."""
    with IndexedWriter(tmp_path / "eights", vocab_size=64) as writer:
        for _ in range(20):
            writer.add_document(np.array([7] * 7 + [0]))
    return str(tmp_path / "eights")


def test_balance_counts_what_each_rank_sees(corpus: str) -> None:
    """Two documents of 8 in 16 tokens: pieces of 4 have 10 pairs at a document's start and 26 at its end."""
    work = attention_work(prepare(loads(config(corpus)), 4), step=0)
    assert (work.pairs, work.causal_pairs) == (2 * 2 * 36, 2 * 136)
    assert work.slowest_to_mean["contiguous"] == pytest.approx(26 / 18)
    # Zigzag pieces of two tokens see 3, 7, 11, 15, 3, 7, 11, 15 pairs; rank r has the r-th from both ends.
    assert work.slowest_to_mean["zigzag"] == pytest.approx((3 + 15) / 18)


def test_ranks_that_share_tokens_by_heads_are_balanced(corpus: str) -> None:
    ulysses = attention_work(prepare(loads(config(corpus, "ulysses")), 4), step=0)
    assert ulysses.slowest_to_mean == {"contiguous": 1.0, "zigzag": 1.0}
    # Without documents, two ranks of a hybrid group see the pairs of 8 tokens, and the other two those of the next 8.
    text = config(corpus, "hybrid", "2").replace(
        "create_compressed_eod_mask: true", "create_compressed_eod_mask: false"
    )
    text = text.replace("num_attention_heads: 4", "num_attention_heads: 4\n  use_attn_mask_compression: true")
    hybrid = attention_work(prepare(loads(text), 4), step=0)
    assert hybrid.slowest_to_mean == {"contiguous": pytest.approx(100 / 68), "zigzag": 1.0}


def test_plan_shows_the_balance_of_each_step(corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(config(corpus), encoding="utf-8")
    assert main(["plan", str(path), "--world-size", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "ranks: 4 = dp_replicate 1 x dp_shard 1 x cp 4 (colossal, contiguous); a step: 2 samples of 16 tokens, "
        "micro-batches of a rank: 2"
    )
    assert [line.split() for line in lines[-2:]] == [[str(step), "144", "52.9%", "1.44", "1.00"] for step in (1, 2)]


def test_plan_refuses_what_cannot_be_planned(corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(config(corpus), encoding="utf-8")
    assert main(["plan", str(path), "--world-size", "6"]) == 2
    assert "6" in capsys.readouterr().err
    assert main(["plan", str(path), "--world-size", "4", "--steps", "0"]) == 2
    assert "--steps 0 must be at least 1" in capsys.readouterr().err
