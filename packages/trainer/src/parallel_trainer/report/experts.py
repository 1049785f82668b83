"""What `monitor.moe_monitor` asks for: how many tokens each expert got, as numbers and as heat maps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from moe_dispatch import ExpertLoad
from parallel_config.schema import MoeMonitor

from parallel_trainer.errors import UserError
from parallel_trainer.parallel.routing_record import ExpertLoads
from parallel_trainer.report.lines import keep_until

TOKENS = "tokens_per_expert.jsonl"


def watched_layers(monitor: MoeMonitor, expert_layers: Sequence[str]) -> tuple[str, ...]:
    """The layers whose loads are kept: those of `target_layers`, numbers and ranges such as "3-5", or all.

    expert_layers: names of the model's layers with experts, "model.layers.3".
    Raises UserError for what is no number or range, and for a layer without experts.
    """
    if monitor.save_tokens_per_expert_interval is None:
        return ()
    if monitor.target_layers is None:
        return tuple(expert_layers)
    chosen = []
    for text in monitor.target_layers:
        first, _, last = text.partition("-")
        ends = [part.strip() for part in (first, last or first)]
        if not all(map(str.isdigit, ends)) or int(ends[0]) > int(ends[1]):
            raise UserError(
                f"monitor.moe_monitor.target_layers has {text!r}: it has to be a layer's number or an ascending range; "
                'write for example ["3", "5-8"].'
            )
        chosen += [f"model.layers.{number}" for number in range(int(ends[0]), int(ends[1]) + 1)]
    without = [layer for layer in chosen if layer not in expert_layers]
    if without:
        numbers = ", ".join(layer.rpartition(".")[2] for layer in expert_layers) or "none"
        raise UserError(
            f"monitor.moe_monitor.target_layers asks for {without[0]}, which has no experts; layers with experts: "
            f"{numbers}."
        )
    return tuple(chosen)


class ExpertFiles:
    """Every few steps a line in `tokens_per_expert.jsonl` of a run's folder; at the end a heat map of each layer.

    folder:   of the run; exists by the first step.
    layers:   whose loads are kept.
    interval: how many steps from line to line.
    after:    steps trained before: lines of later ones, which are trained again, are dropped.
    """

    def __init__(self, folder: Path, layers: Sequence[str], interval: int, *, after: int = 0) -> None:
        self._folder = folder
        self._layers = tuple(layers)
        self._interval = interval
        self._loads: dict[str, ExpertLoad] = {}
        for record in keep_until(folder / TOKENS, after):
            self._record({layer: np.array(tokens) for layer, tokens in record["tokens_per_expert"].items()})

    def step(self, step: int, loads: ExpertLoads) -> None:
        """Keep a step's loads if it is one of those that are kept: step 1 and every `interval` steps after it."""
        if (step - 1) % self._interval:
            return
        counts = {layer: loads.tokens_per_expert[loads.layers.index(layer)] for layer in self._layers}
        self._record(counts)
        with (self._folder / TOKENS).open("a", encoding="utf-8") as file:
            numbers = {layer: tokens.tolist() for layer, tokens in counts.items()}
            file.write(json.dumps({"step": step, "tokens_per_expert": numbers}) + "\n")

    def _record(self, counts: Mapping[str, np.ndarray]) -> None:
        for layer, tokens in counts.items():
            self._loads.setdefault(layer, ExpertLoad(tokens.size)).record(tokens)

    def close(self) -> None:
        """Draw what was kept: `expert_load_model.layers.3.png`."""
        for layer, load in self._loads.items():
            load.save_heat_map(self._folder / f"expert_load_{layer}.png")
