"""How fast the dimensions of a head turn with the position: plain rotary embedding, or YaRN for longer sequences.

Su et al., "RoFormer", 2021; Peng et al., "YaRN", arXiv:2309.00071. NumPy only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import fields, frozen


@frozen(kw_only=True)
class Yarn:
    """Stretching positions by `factor`, with the names of `rope_scaling` in Hugging Face configurations.

    Dimensions that turn more than `beta_fast` times over the original length stay as they are, those that turn less
    than `beta_slow` times turn `factor` times as slowly, and between them frequencies are blended.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def table_scale(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def softmax_scale(self) -> float:
        """What DeepSeek's latent attention multiplies its scores by, beside the root of the head size."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def blend(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """The plain `frequencies` (pairs,) of a head, each kept, slowed down or between the two."""
        low, high = (self._pair(turns, len(frequencies), theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
        slowed = np.clip((np.arange(len(frequencies)) - low) / max(high - low, 0.001), 0, 1)
        return frequencies * (1 - slowed) + frequencies / self.factor * slowed

    def _pair(self, turns: float, pairs: int, theta: float) -> float:
        """The pair, counted as a fraction, that turns so often over the original length."""
        return pairs * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)


def frequencies(size: int, theta: float, yarn: Yarn | None = None) -> np.ndarray:
    """Radians a position for each pair among `size` dimensions, float64 (size / 2,), fastest first."""
    plain = theta ** (-np.arange(0, size, 2) / size)
    return plain if yarn is None else yarn.blend(plain, theta)


FLAT_FIELDS = ("position_embedding_type", "scaling_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""MindFormers' own names, which its files write beside the sizes instead of a `rope_scaling`."""


def read_yarn(
    rope_scaling: Mapping[str, Any] | None, flat: Mapping[str, Any], max_position_embeddings: int | None
) -> tuple[Yarn | None, list[str]]:
    """The YaRN that a `model` section asks for, None for plain rotary embedding; and what is wrong with it.

    rope_scaling: that field, with `type` or `rope_type` "yarn" or "default".
    flat:         what the section has of `FLAT_FIELDS`; with position_embedding_type "yarn", mscale and mscale_all_dim
        are 0.707 where they are left out, as in MindFormers.
    max_position_embeddings: the original length, where `rope_scaling` names none.
    """
    if rope_scaling is not None:
        values, where = dict(rope_scaling), "model.rope_scaling"
        kind = values.pop("rope_type", values.pop("type", None))
        kinds = ("yarn", "default")
    else:
        values, where = {"mscale": 0.707, "mscale_all_dim": 0.707, **flat}, "model.position_embedding_type"
        kind = values.pop("position_embedding_type", "rope")
        kinds = ("yarn", "rope")
        if "scaling_factor" in values:
            values["factor"] = values.pop("scaling_factor")
    if kind not in kinds:
        return None, [f"{where} has type {kind!r}: it has to be {' or '.join(map(repr, kinds))}."]
    if kind != "yarn":
        return None, []
    values.setdefault("original_max_position_embeddings", max_position_embeddings)
    names = {attribute.name for attribute in fields(Yarn)}
    problems = [
        f"{where}: {name} is no field of yarn; use {', '.join(sorted(names))}."
        for name in sorted(values.keys() - names)
    ]
    for name in ("factor", "original_max_position_embeddings"):
        value = values.get(name)
        if not isinstance(value, int | float) or value <= 0:
            problems.append(f"{where}: yarn needs a {name} above 0, and has {value!r}.")
    return (None, problems) if problems else (Yarn(**values), [])
