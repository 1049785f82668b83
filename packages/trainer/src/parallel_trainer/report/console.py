"""The terminal's view of a run: a line per step and, on a terminal, a progress bar below them."""

from __future__ import annotations

import os
import sys

from tqdm import tqdm

from parallel_trainer.report.record import EvaluationRecord, StepRecord

# Ranks write through mpiexec's pipes; the process that started them says here whether a person is watching.
TERMINAL_VARIABLE = "PARALLEL_TRAIN_TERMINAL"


def watched() -> bool:
    """Whether stderr reaches a terminal."""
    return sys.stderr.isatty() or os.environ.get(TERMINAL_VARIABLE) == "1"


class Console:
    """Prints steps to stdout; the bar goes to stderr."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._steps = self._skipped = 0
        self._bar = tqdm(total=total_steps, unit="step", ncols=100, mininterval=0.5) if watched() else None

    def step(self, record: StepRecord) -> None:
        width = len(str(self._total))
        line = (
            f"step {record.step:{width}d}/{self._total}  loss {record.loss:9.6f}  lr {record.lr:.3e}  "
            f"grad_norm {record.grad_norm:9.5f}  {record.tokens_per_second:8,.0f} tokens/s  {record.seconds:6.3f} s"
        )
        for name, loss in (("mtp", record.mtp_loss), ("balance", record.balance_loss)):
            line += "" if loss is None else f"  {name} {loss:.6f}"
        self._steps += 1
        if not record.updated:
            self._skipped += 1
            line += "  skipped: not finite" if record.valid_tokens else "  skipped: no valid token"
        self._print(line)
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {record.loss:.4f}")
            self._bar.update()

    def evaluation(self, record: EvaluationRecord) -> None:
        line = (
            f"eval {record.step:{len(str(self._total))}d}/{self._total}  loss {record.eval_loss:9.6f}  perplexity "
            f"{record.eval_perplexity:.4f}  {record.eval_samples:,} samples  {record.eval_seconds:.3f} s"
        )
        self._print(line if record.eval_mtp_loss is None else f"{line}  mtp {record.eval_mtp_loss:.6f}")

    def _print(self, line: str) -> None:
        if self._bar is None:
            print(line, flush=True)
        else:
            tqdm.write(line)

    def close(self) -> None:
        """Take the bar away, and say how many steps were skipped if any were."""
        if self._bar is not None:
            self._bar.close()
        if self._skipped:
            print(f"Skipped were {self._skipped} of {self._steps} steps: they changed nothing.", flush=True)
