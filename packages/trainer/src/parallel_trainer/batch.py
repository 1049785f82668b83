"""The rows that one forward pass takes, and which of their tokens count."""

from __future__ import annotations

import numpy as np
from attrs import Factory, evolve, field, frozen
from mask_compression import CompressedMask, causal

IGNORED_LABEL = -100


@frozen(eq=False, repr=False)  # MindSpore prints the arguments of every cell it runs
class MicroBatch:
    """B rows of S tokens on one rank.

    input_ids:    int32 (B, S), ids of the tokens.
    position_ids: int32 (B, S), position of each token, for the rotary embedding.
    labels:       int32 (B, S), id to predict at each place; None to ask for logits instead of a loss.
    loss_mask:    float32 (B, S), 1 where the prediction counts, else 0; None counts all.
    mask:         which tokens of a row see each other. It is always that of whole rows, also where the tokens here are
        a rank's part of them; causal over each row if left out.
    ahead:        the same places one token further, for a model that predicts that too; see `look_ahead`.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    labels: np.ndarray | None = None
    loss_mask: np.ndarray | None = None
    mask: CompressedMask = field(
        default=Factory(lambda batch: causal(batch.input_ids.shape[1], rows=len(batch.input_ids)), takes_self=True)
    )

    ahead: MicroBatch | None = None

    def valid_tokens(self) -> float:
        """How many predictions count: what the loss of the batch is divided by."""
        labels = np.zeros_like(self.input_ids) if self.labels is None else self.labels
        return float(token_weights(labels, self.loss_mask).sum())

    def counts(self, losses: int) -> np.ndarray:
        """How many predictions count for each of a model's losses, float64 (losses,)."""
        batches = (self, self.ahead)
        return np.array([batch.valid_tokens() for batch in batches if batch is not None][:losses])


def token_weights(labels: np.ndarray, loss_mask: np.ndarray | None) -> np.ndarray:
    """How much each prediction counts, float64 of the labels' shape: its mask, and 0 for a label of `IGNORED_LABEL`."""
    weights = (labels != IGNORED_LABEL).astype(np.float64)
    return weights if loss_mask is None else weights * np.asarray(loss_mask, np.float64).reshape(weights.shape)


def look_ahead(batch: MicroBatch) -> MicroBatch:
    """The same whole rows with their `ahead`: at each place the token that follows, what follows it, and its mask.

    After the last token of a row nothing is known, and after that of a document that attention keeps apart comes
    another one: their mask is 0. Made before context parallelism cuts the rows.
    """
    assert batch.labels is not None, "what is ahead of tokens is for losses"
    mask = np.ones(batch.input_ids.shape, np.float32) if batch.loss_mask is None else batch.loss_mask
    ids, labels, mask = (_shifted(column) for column in (batch.input_ids, batch.labels, mask))
    np.put(mask, batch.mask.ends - 1, 0)
    return evolve(batch, ahead=evolve(batch, input_ids=ids, labels=labels, loss_mask=mask))


def _shifted(column: np.ndarray) -> np.ndarray:
    """Each row one place to the left, with a 0 at its end."""
    shifted = np.zeros_like(column)
    shifted[:, :-1] = column[:, 1:]
    return shifted
