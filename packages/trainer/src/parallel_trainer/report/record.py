"""The numbers of one step, and of one evaluation, as every report shows them."""

from __future__ import annotations

from attrs import frozen


@frozen
class StepRecord:
    """One training step.

    step:              counted from 1.
    loss:              mean over the valid tokens of the global batch; NaN where there is none, as other losses.
    lr:                the learning rate that this step applied, or would have.
    grad_norm:         global L2 norm before clipping; NaN where there is no valid token.
    tokens_per_second: tokens of the global batch per second, over all ranks.
    seconds:           of the step, reading its batch included.
    valid_tokens:      tokens that the loss is the mean of.
    consumed_samples:  samples of all steps so far, this one included.
    updated:           False where the step was skipped: it was not finite, or valid_tokens is 0.
    mtp_loss:          mean loss of the multi-token-prediction layer, without its weight; None where there is none.
    balance_loss:      auxiliary loss of all routers, with its coefficient; None for a model without experts.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds: float
    valid_tokens: int
    consumed_samples: int
    updated: bool
    mtp_loss: float | None = None
    balance_loss: float | None = None


@frozen
class EvaluationRecord:
    """One evaluation.

    step:              after which it was, counted from 1.
    eval_loss:         mean over the valid tokens of the samples held out.
    eval_perplexity:   exp of that.
    eval_samples:      how many samples.
    eval_valid_tokens: tokens that the loss is the mean of.
    eval_seconds:      how long it took, reading the samples included.
    eval_mtp_loss:     mean loss of the multi-token-prediction layer, without its weight; None where there is none.
    """

    step: int
    eval_loss: float
    eval_perplexity: float
    eval_samples: int
    eval_valid_tokens: int
    eval_seconds: float
    eval_mtp_loss: float | None = None
