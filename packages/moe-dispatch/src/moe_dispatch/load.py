"""How evenly tokens fall on experts, step after step, in numbers and as a heat map (extra `plot`)."""

from __future__ import annotations

from os import PathLike
from typing import Any

import numpy as np
from attrs import define, field

from moe_dispatch.layout import Array, Ints, check_array


@define(eq=False)
class ExpertLoad:
    """The rows that each expert got in each recorded step.

    `Route.counts` has those of one rank's experts; `group.all_gather(route.counts)` joins them to the counts of all.

    >>> load = ExpertLoad(num_experts=4)
    >>> load.record(np.array([5, 5, 5, 5]))
    >>> load.record(np.array([16, 4, 0, 0]))
    >>> load.imbalance.tolist(), load.unused.tolist()
    ([1.0, 3.2], [0, 2])
    """

    num_experts: int
    _steps: list[Ints] = field(init=False, factory=list)

    def record(self, counts: Array) -> None:
        """Add a step: integers (num_experts,), 0 or more.

        Raises ValueError for another shape, another kind of numbers or a negative one, TypeError for what is no array.
        """
        check_array(counts, "a step's counts")
        if counts.shape != (self.num_experts,) or counts.dtype.kind not in "iu" or (counts < 0).any():
            raise ValueError(
                f"a step's counts have shape {counts.shape} and dtype {counts.dtype}, the least is "
                f"{counts.min() if counts.size else 'missing'}: they must be {self.num_experts} integers of 0 or more, "
                "one for each expert; join those of several ranks with group.all_gather(route.counts)"
            )
        self._steps.append(counts.astype(np.int64))

    @property
    def counts(self) -> Ints:
        """(steps, num_experts)."""
        return np.array(self._steps, np.int64).reshape(-1, self.num_experts)

    @property
    def shares(self) -> Array:
        """(steps, num_experts): an expert's rows over the mean of all, 1 where they are even or there are none."""
        counts = self.counts
        mean = counts.mean(axis=1, keepdims=True)
        return np.divide(counts, mean, out=np.ones(counts.shape), where=mean > 0)

    @property
    def imbalance(self) -> Array:
        """(steps,): the fullest expert's rows over the mean of all; 1 is even, num_experts is all to one."""
        fullest: Array = self.shares.max(axis=1)
        return fullest

    @property
    def unused(self) -> Ints:
        """(steps,): how many experts got no row."""
        number: Ints = (self.counts == 0).sum(axis=1)
        return number

    def save_heat_map(self, path: str | PathLike[str], *, dots_per_inch: int = 150) -> None:
        """Draw the shares, experts over steps, above the imbalance, into a file of the format that its name ends with.

        Raises ValueError where no step was recorded or Matplotlib does not know the format, ImportError without
        Matplotlib, OSError where the file cannot be written.
        """
        if not self._steps:
            raise ValueError("a heat map of 0 steps: record at least 1 before drawing")
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("a heat map is drawn with Matplotlib: pip install 'moe-dispatch[plot]'") from error
        figure = Figure(figsize=(9, 6), layout="constrained")
        FigureCanvasAgg(figure)
        above, below = figure.subplots(2, 1, height_ratios=(4, 1), sharex=True)
        self._draw_shares(figure, above)
        self._draw_imbalance(below)
        figure.savefig(path, dpi=dots_per_inch)

    def _draw_shares(self, figure: Any, axes: Any) -> None:
        shares, steps = self.shares, len(self._steps)
        edges = (-0.5, steps - 0.5, self.num_experts - 0.5, -0.5)
        # One overfull expert would leave all others dark: colours end at twice the even share.
        picture = axes.imshow(
            shares.T, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest", extent=edges
        )
        figure.colorbar(picture, ax=axes, label="rows / mean of all experts", extend="max")
        axes.set_ylabel("expert")
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_title(f"{self.num_experts} experts, {steps} steps", loc="left")

    def _draw_imbalance(self, axes: Any) -> None:
        axes.plot(self.imbalance, color="#3b6ea5", drawstyle="steps-mid", label="fullest / mean")
        axes.set_xlabel("recorded step")
        axes.set_ylabel("fullest / mean")
        axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
