"""How much a step takes and how long the run is: batch sizes, micro-batches, epochs.

Sources, in the mindformers 2.1.0 wheel: trainer/base_trainer.py (`_check_global_batch_size_for_auto_parallel`: with a
pipeline the global batch is batch_size · data_parallel · micro_batch_num · micro_batch_interleave_num, without one
gradient_accumulation_steps takes the place of micro_batch_num; `_train_dataset_postprocess`: a Megatron dataset has
sizes[0] // global batch steps), trainer/utils.py (`check_runner_config`: epochs · steps of the dataset, however
sink_size cuts them), core/callback/callback.py (stop_step).
"""

from __future__ import annotations

from parallel_config.migrate.degrees import Degrees
from parallel_config.migrate.draft import Draft

_RUNNER = "runner_config"
_BATCH = f"{_RUNNER}.batch_size"
_ACCUMULATION = f"{_RUNNER}.gradient_accumulation_steps"
_MICRO = "parallel_config.micro_batch_num"
_INTERLEAVE = "micro_batch_interleave_num"
_LOADER = "train_dataset.data_loader"


def batch(draft: Draft, found: Degrees, steps: int | None) -> int | None:
    """Carry batch sizes and the length; returns the steps of the run, None where nothing says them.

    steps: what the user says, for data whose size the file does not give.
    """
    global_batch = _batch_sizes(draft, found)
    total, how = _steps(draft, global_batch)
    if steps is not None:
        if total is not None:
            draft.refuse(
                f"{_RUNNER}.epochs", f"makes {total} steps ({how}), and --steps is {steps}", "Leave --steps out."
            )
        total, how = steps, "as --steps says"
    if total is None:
        rule = "is a number of passes through data whose size the file does not say"
        draft.refuse(f"{_RUNNER}.epochs", rule, "Say how many steps the run has: --steps N.")
        return None
    stop = f"{_RUNNER}.stop_step"
    last = draft.integer(stop, 0, minimum=0)
    sources: tuple[str, ...] = (f"{_RUNNER}.epochs",)
    if 0 < last < total:
        total, how, sources = last, f"stop_step ends the run before its {total} steps", (*sources, stop)
    draft.carry(sources, "training.steps", total, how)
    return total


def _batch_sizes(draft: Draft, found: Degrees) -> int:
    rows = draft.integer(_BATCH, 1)
    accumulated, micro = draft.integer(_ACCUMULATION, 1), draft.integer(_MICRO, 1)
    copies = draft.integer(_INTERLEAVE, 1)
    factors, sources = {"batch_size": rows, "data_parallel": found.dp}, [_BATCH]
    if not found.split:
        draft.leave(_MICRO, "there is no pipeline")
        draft.leave(_INTERLEAVE, "models are not split")
        why = "MindFormers accumulates gradients in the semi-automatic mode only"
        draft.leave(_ACCUMULATION, why)
    else:
        if found.pp > 1:
            factors["micro_batch_num"] = micro
            sources.append(_MICRO)
            draft.leave(_ACCUMULATION, "with a pipeline MindFormers takes micro_batch_num instead")
        else:
            factors["gradient_accumulation_steps"] = accumulated
            sources.append(_ACCUMULATION)
            draft.leave(_MICRO, "pipeline_stage is 1, and without a pipeline MindFormers takes 1")
        factors["micro_batch_interleave_num"] = copies
        sources.append(_INTERLEAVE)
    product = 1
    for factor in factors.values():
        product *= factor
    how = " · ".join(f"{name} {factor}" for name, factor in factors.items())
    draft.carry(_BATCH, "training.local_batch_size", rows, "" if draft.has(_BATCH) else "MindFormers' default")
    draft.carry(tuple(sources), "training.global_batch_size", product, how)
    return product


def _steps(draft: Draft, global_batch: int) -> tuple[int | None, str]:
    """The steps of the run and how they come about; None where the size of the data is not in the file."""
    epochs = draft.integer(f"{_RUNNER}.epochs", 1)
    sizes = draft.get(f"{_LOADER}.sizes")
    samples = sizes[0] if isinstance(sizes, list) and sizes else None
    if not isinstance(samples, int) or isinstance(samples, bool):
        return None, ""
    each = samples // global_batch
    how = f"epochs {epochs} · (sizes[0] {samples} // global_batch_size {global_batch})"
    if each < 1:
        rule = f"has {samples} samples, fewer than the global batch size {global_batch}: there is no step"
        draft.refuse(f"{_LOADER}.sizes", rule, f"Use at least {global_batch}.")
        return 1, how
    return epochs * each, how
