"""What a model gets to read and predict: one sample, and samples as the rows of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from mask_compression import causal, from_ends, from_tokens

from parallel_trainer.batch import MicroBatch
from parallel_trainer.data.settings import SampleSettings
from parallel_trainer.errors import UserError


@frozen(eq=False)
class Sample:
    """input_ids, labels, position_ids int32 (S,); loss_mask float32 (S,), 1 where the label counts.

    document_ends: int64 (documents,), one past the last token of each part of the sample that sees only itself.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    position_ids: np.ndarray
    document_ends: np.ndarray


def make_sample(tokens: np.ndarray, settings: SampleSettings) -> Sample:
    """The sample of `tokens`, integers (S + 1,) or, without the extra token, (S,).

    Labels are the tokens one place further, taken before anything is cut over ranks. A label that is `pad`
    does not count. Places that hold `pad` become 0 at the end, an id that every model has. Where `pad` is `eod` only
    what `SampleSettings.filler` fills up is padding.

    Raises UserError for more documents than `settings.max_documents`.
    """
    tokens = tokens.astype(np.int32)
    if settings.extra_token:
        inputs, labels = tokens[:-1].copy(), tokens[1:].copy()
    else:
        inputs, labels = tokens.copy(), np.append(tokens[1:], np.int32(settings.filler))
    whole = causal(len(inputs))
    by_document = settings.separate_documents or settings.reset_position_ids
    documents = from_tokens(inputs, settings.eod) if by_document else whole
    mask = documents if settings.separate_documents else whole
    if settings.max_documents is not None and len(mask.ends) > settings.max_documents:
        raise UserError(
            f"A sample has {len(mask.ends)} documents, and actual_seq_len has room for {settings.max_documents}: write "
            f"train_dataset.dataloader.config.eod_pad_length: {len(mask.ends)} or more (no sample has more than "
            f"seq_length {settings.seq_length})."
        )
    loss_mask = (labels != settings.filler).astype(np.float32)
    if settings.eod_mask_loss:
        loss_mask[inputs == settings.eod] = 0
    (positions,) = documents.position_ids(reset=settings.reset_position_ids)
    inputs[inputs == settings.filler] = 0
    labels[labels == settings.filler] = 0
    return Sample(inputs, labels, loss_mask, positions, mask.ends)


def stack(samples: Sequence[Sample]) -> MicroBatch:
    """Samples as the rows of one batch."""
    return MicroBatch(
        input_ids=np.stack([sample.input_ids for sample in samples]),
        labels=np.stack([sample.labels for sample in samples]),
        loss_mask=np.stack([sample.loss_mask for sample in samples]),
        position_ids=np.stack([sample.position_ids for sample in samples]),
        mask=from_ends([sample.document_ends for sample in samples]),
    )
