"""The sections `recompute`, `recompute_comm` and `swap`: trading time for memory."""

from __future__ import annotations

from attrs import Factory, frozen

from parallel_config.schema.setting import LayerText, setting

LayerSpecs = tuple[LayerText, ...]
"""Layers, each item "n" or "a-b"."""

LayersByModule = dict[str, LayerSpecs]
"""For each module path (a regular expression), its layers."""


@frozen
class Recompute:
    """Activations that are computed again in the backward pass instead of kept."""

    mode: str = setting("None", options=("None", "full", "select"))
    full_recompute_layer: LayerSpecs | None = None
    select_module: LayersByModule | None = None
    exclude_op: tuple[str, ...] | LayersByModule | None = None


@frozen
class RecomputeComm:
    """The same for the results of collectives."""

    enable: bool = False
    select_module: LayersByModule | None = None


@frozen
class LayerSwap:
    """Layers whose activations wait in host memory."""

    layers: LayerSpecs = ()


@frozen
class OpSwap:
    """An operator whose results wait in host memory, in these layers."""

    op_name: str = ""
    layers: LayerSpecs = ()


@frozen
class Swap:
    """Activations kept in host memory until their backward pass."""

    enable: bool = False
    default_prefetch: int = setting(1, minimum=1)
    layer_swap: tuple[LayerSwap, ...] = Factory(tuple)
    op_swap: tuple[OpSwap, ...] = Factory(tuple)
