"""What a run computed, step by step, kept to compare it with another run of the same file."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np
from attrs import frozen
from device_mesh import abort_on_error, connect
from parallel_config import ConfigError, ParallelPlan, TrainConfig, load, plan

from parallel_trainer.errors import UserError
from parallel_trainer.job import degrees, prepare
from parallel_trainer.models.config import model_config

if TYPE_CHECKING:
    from parallel_trainer.trainer import Trainer


@frozen(eq=False)
class Trace:
    """What ran, losses and gradient norms of each step, and the weights after the last.

    other_losses:      those of multi-token prediction and balancing by name, for a model that has them.
    tokens_per_expert: int64 (steps, layers with experts, experts), 0 in steps that were skipped; of size 0 without
        experts.
    """

    plan: str
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    weights: dict[str, np.ndarray]
    other_losses: dict[str, tuple[float, ...]]
    tokens_per_expert: np.ndarray

    @classmethod
    def record(cls, trainer: Trainer, steps: int) -> Trace:
        """Train so many steps. Collective over the world."""
        model = trainer.job.model
        loads_shape = (len(model.expert_layers), model.routing.experts) if model.routing else (0,)
        results, loads = [], []
        for _ in range(steps):
            results.append(trainer.train_step())
            loads.append(np.zeros(loads_shape) if trainer.loads is None else trainer.loads.tokens_per_expert)
        others = {name: tuple(getattr(result, name) for result in results) for name in ("mtp_loss", "balance_loss")}
        return cls(
            describe(trainer.job.plan),
            tuple(result.loss for result in results),
            tuple(result.grad_norm for result in results),
            dict(trainer.full_values()),
            {name: values for name, values in others.items() if None not in values},
            np.array(loads, np.int64),
        )

    def save(self, folder: Path) -> None:
        """Write the trace into a folder that exists."""
        steps = {
            "plan": self.plan,
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "other_losses": self.other_losses,
            "tokens_per_expert": self.tokens_per_expert.tolist(),
        }
        np.savez(folder / "weights.npz", **self.weights)
        (folder / "steps.json").write_text(json.dumps(steps), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Trace:
        """Read what `save` wrote."""
        steps = json.loads((folder / "steps.json").read_text(encoding="utf-8"))
        with np.load(folder / "weights.npz") as weights:
            return cls(
                steps["plan"],
                tuple(steps["losses"]),
                tuple(steps["grad_norms"]),
                dict(weights),
                {name: tuple(values) for name, values in steps["other_losses"].items()},
                np.array(steps["tokens_per_expert"], np.int64),
            )


def on_one_rank(config: TrainConfig, world_size: int) -> TrainConfig:
    """What `world_size` ranks train, with no parallelism: every degree 1, everything else as it is.

    An auxiliary loss over the global batch counts choices from micro-batch to micro-batch: then one rank gets as many
    as each of the ranks, with the samples of all of them.
    """
    training = config.training
    if model_config(config.model).balanced_over == "global_batch":
        together = plan(config, world_size).data_parallel * training.local_batch_size
        training = attrs.evolve(training, local_batch_size=together)
    return attrs.evolve(config, parallelism=type(config.parallelism)(), training=training)


def describe(plan: ParallelPlan) -> str:
    """The plan of a run in a few words."""
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    return f"{ranks} ({degrees(plan)})"


def main(argv: list[str] | None = None) -> None:
    """Be one rank of a traced run; rank 0 saves the trace into FOLDER."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--one-rank-of", type=int)
    args = parser.parse_args(argv)
    communicator = connect()
    warnings.simplefilter("ignore")  # `verify` shows them
    with abort_on_error(communicator, message_only=(UserError, ConfigError)):
        from parallel_trainer.trainer import Trainer

        config = load(args.config)
        config = on_one_rank(config, args.one_rank_of) if args.one_rank_of else config
        job = prepare(config, communicator.size, dtype=args.dtype)
        trace = Trace.record(Trainer(job, communicator), args.steps)
        if communicator.rank == 0:
            trace.save(args.folder)


if __name__ == "__main__":
    main()
