"""Predicting one token further ahead: a module between the last layer and the head, and a head with two losses.

DeepSeek-AI, arXiv:2412.19437, section 2.2, with the names of the published checkpoint's layer 61. Where the paper's
formulas leave a choice, it is that of Megatron-LM (`multi_token_prediction.py`) and of transformers 5 (`MtpLayer`):
what goes in is the hidden state after the final norm, and the next token's embedding stands before it,
eh_proj([enorm(embedding); hnorm(hidden)]). The module's layer has the rotary angles and the mask of the position that
predicts, as in Megatron-LM. The embedding's table and the head's are the model's own.
"""

from __future__ import annotations

from mindspore import Tensor

from parallel_trainer.batch import MicroBatch
from parallel_trainer.costs import Costs, OnRank
from parallel_trainer.models.layers import Declare, DecoderLayer, final_norm, predict
from parallel_trainer.models.section import ModelConfig
from parallel_trainer.models.unit import Unit
from parallel_trainer.models.used import Used, UsedTensors
from parallel_trainer.parallel.tensor_parallel import TensorParallel
from parallel_trainer.parallel.weights import Weight


class MultiTokenPrediction(Unit):
    """Hidden states (T, H) of the last layer to (T, 2H): after the final norm, and of one prediction further.

    A micro-batch without labels has no tokens ahead, and gets the first half alone, (T, H).
    """

    def __init__(
        self, layer: DecoderLayer, declare: Declare, table: Weight, config: ModelConfig, tp: TensorParallel
    ) -> None:
        hidden = config.hidden_size
        super().__init__(
            (
                final_norm(config),
                table,
                declare.norm("enorm", hidden),
                declare.norm("hnorm", hidden),
                *declare.whole("eh_proj", hidden, 2 * hidden),
                *layer.weights,
                declare.norm("shared_head.norm", hidden),
            )
        )
        self._names = tuple(weight.name.removeprefix(declare.prefix) for weight in self.weights)
        self.layer = layer
        self._vocab_size, self._hidden = config.vocab_size, hidden
        self._tp = tp
        self._eps = config.rms_norm_eps

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        used = UsedTensors(dict(zip(self._names, weights, strict=True)), self._tp, self._eps)
        main_TH = used.norm(x, "model.norm")
        if batch.labels is None:
            return main_TH
        assert batch.ahead is not None, "look_ahead gives a micro-batch its tokens ahead"
        ids = Tensor(batch.ahead.input_ids.reshape(-1))
        next_TH = self._tp.embedding(ids, used["model.embed_tokens.weight"], self._vocab_size)
        return self._tp.kernels.concat(main_TH, self.further(main_TH, next_TH, batch, used))

    def further(self, main_TH: Tensor, next_TH: Tensor, batch: MicroBatch, used: Used) -> Tensor:
        """Of hidden states after the final norm and the next tokens' embedding what the head predicts further from."""
        both = self._tp.kernels.concat(used.norm(next_TH, "enorm"), used.norm(main_TH, "hnorm"))
        x_TH = self.layer(used.linear(both, "eh_proj"), batch, used)
        return used.norm(x_TH, "shared_head.norm")

    def costs(self, rank: OnRank) -> Costs:
        """Those of its layer and of an embedding; kept are what four norms and eh_proj get, and each norm's roots."""
        tokens, hidden = rank.own_tokens, self._hidden
        own = Costs(kept=tokens * (4 * (hidden + 1) + 2 * hidden), left=tokens * 3 * hidden)
        return rank.border(hidden) + own + self.layer.costs(rank)


class MultiTokenHead(Unit):
    """Normed hidden states (T, 2H) to the two loss sums, (2,): of the next token, and of the one after it.

    Without labels, hidden states (T, H) to logits (B, S, V).
    """

    def __init__(self, table: Weight, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__([table])
        self._tp = tp

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        (table,) = weights
        vocab_size, hidden = self.weights[0].shape
        if batch.labels is None:
            return predict(x, table, batch, vocab_size, self._tp)
        assert batch.ahead is not None, "look_ahead gives a micro-batch its tokens ahead"
        main_TH, further_TH = self._tp.kernels.split(x, (hidden, hidden))
        return self._tp.kernels.concat(
            predict(main_TH, table, batch, vocab_size, self._tp),
            predict(further_TH, table, batch.ahead, vocab_size, self._tp),
        )

    def costs(self, rank: OnRank) -> Costs:
        """Two predictions, and what comes in, of which each gets a copy of its half."""
        vocab_size, hidden = self.weights[0].shape
        one = rank.prediction(hidden, vocab_size)
        return one + one + Costs(kept=2 * hidden * rank.own_tokens)
