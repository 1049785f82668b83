"""What a run needs of whoever trains."""

from __future__ import annotations

from typing import Protocol

from parallel_trainer.job import Job
from parallel_trainer.models.layers import Model
from parallel_trainer.parallel.routing_record import ExpertLoads
from parallel_trainer.step import StepResult


class EngineTrainer(Protocol):
    """Training of a `Job` on one rank: `parallel_trainer.trainer.Trainer`, or another engine's."""

    job: Job
    model: Model
    step: int
    """Steps trained."""
    consumed: int
    """Samples trained on."""
    loads: ExpertLoads | None
    """What routers did in the last step; None for a model without experts, and where no token was valid."""

    @property
    def lr(self) -> float:
        """The learning rate that the next step applies."""

    @property
    def held(self) -> int:
        """How many parameters this rank holds between steps."""

    def train_step(self) -> StepResult:
        """Train on the next global batch. Collective over the world."""
