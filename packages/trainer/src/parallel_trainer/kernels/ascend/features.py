"""Features of a token put beside each other, and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor, mint

from parallel_trainer.kernels.ascend.tensors import wide
from parallel_trainer.kernels.checks import check_sizes


def split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """See `Kernels.split`."""
    check_sizes(sizes, x.shape[-1])
    starts = np.cumsum((0, *sizes[:-1])).tolist()
    # Not mint.split: its gradient on a CPU (MindSpore 2.10) is wrong where its parts go on to mint.cat.
    return tuple(mint.narrow(x, -1, start, size).contiguous() for start, size in zip(starts, sizes, strict=True))


def concat(*parts: Tensor) -> Tensor:
    """See `Kernels.concat`. The gradients of copies are added up in float32."""
    dims = np.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return mint.cat([_copied(part, dims) for part in parts], -1)


def _copied(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x if x.shape[:-1] == dims else mint.broadcast_to(wide(x), (*dims, x.shape[-1])).astype(x.dtype)
