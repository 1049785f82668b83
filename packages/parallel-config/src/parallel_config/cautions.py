"""Values of a file that are allowed and that hardly anybody means."""

from __future__ import annotations

from collections.abc import Iterator

from parallel_config.problems import show
from parallel_config.schema import LrScheduler, TrainConfig, written_fields


def cautions(config: TrainConfig) -> Iterator[str]:
    """A sentence on each: learning rates that the run never reaches, clipping switched off, padding that ends."""
    if config.lr_scheduler.type is not None:
        yield from _warm_up(config.lr_scheduler, config.training.steps)
        yield from _cosine_cut_off(config.lr_scheduler, config.training.steps)
    yield from _decay(config)
    if config.training.max_norm < 0:
        yield (
            f"training.max_norm {show(config.training.max_norm)} is negative, which switches clipping off: gradients "
            "keep their norm. Write 0 if that is meant, or a positive number such as 1.0 to clip."
        )
    yield from _padding(config)


def _warm_up(section: LrScheduler, steps: int) -> Iterator[str]:
    """A warm-up that is not over before the last update, which is number steps - 1."""
    ratio, written = section.warmup_ratio, section.warmup_steps or 0
    length = written if ratio is None else int(steps * ratio)
    rate, start = section.learning_rate, section.warmup_lr_init
    if length < steps or not steps or rate == start:
        return
    reached = start + (rate - start) * (steps - 1) / length
    name, value = ("warmup_steps", length) if ratio is None else ("warmup_ratio", ratio)
    yield (
        f"lr_scheduler.{name} {show(value)}: the warm-up of {length} steps does not end within training.steps {steps}, "
        f"so learning_rate {show(rate)} is never reached; the last step has {reached:.4g}. Shorten the warm-up, or "
        "train more steps."
    )


def _cosine_cut_off(section: LrScheduler, steps: int) -> Iterator[str]:
    """A cosine is as long as the run, whatever decay_steps says, and stops there."""
    if section.type != "CosineWithWarmUpLR" or section.decay_steps in (None, steps):
        return
    cut = section.decay_steps
    effect = f"from step {cut} on the rate is lr_end {show(section.lr_end or 0.0)}, at once"
    yield (
        f"lr_scheduler.decay_steps {cut} does not set how long the cosine is, that is training.steps {steps}: "
        f"{effect if cut is not None and cut < steps else 'it has no effect'}."
    )


def _decay(config: TrainConfig) -> Iterator[str]:
    rate, decay = config.lr_scheduler.learning_rate, config.optimizer.weight_decay
    if rate * decay >= 1:
        yield (
            f"lr_scheduler.learning_rate {show(rate)} times optimizer.weight_decay {show(decay)} is {rate * decay:g}: "
            f"an update multiplies each weight that decays by 1 - {rate * decay:g}, so nothing of it is left, or its "
            "sign changes. Lower one of them."
        )


def _padding(config: TrainConfig) -> Iterator[str]:
    """The same token for padding and ends, once for both sections."""
    loaders = {"train_dataset.dataloader": config.train_dataset.dataloader}
    if "eval_dataset.dataloader" in written_fields(config):
        loaders["eval_dataset.dataloader"] = config.eval_dataloader
    for path, loader in loaders.items():
        data = loader.config
        if data.pad == data.eod >= 0:
            yield (
                f"{path}.config.pad and eod are both {data.eod}: that token ends documents, is read and learned like "
                "any other, and only places that are filled up count as padding."
            )
            return
