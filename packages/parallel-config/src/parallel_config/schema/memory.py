"""The sections `recompute`, `recompute_comm` and `swap`: trading time for memory."""

from __future__ import annotations

from attrs import Factory, frozen

from parallel_config.schema.setting import HYPERPARALLEL, NOWHERE, LayerText, setting

LayerSpecs = tuple[LayerText, ...]
"""Layers, each item "n" or "a-b"."""

LayersByModule = dict[str, LayerSpecs]
"""For each module path (a regular expression), its layers."""


@frozen
class Recompute:
    """Activations that are computed again in the backward pass instead of kept."""

    mode: str = setting(
        "None",
        options=("None", "full", "select"),
        about="Which activations are computed again in the backward pass.",
        acts=HYPERPARALLEL,
    )
    full_recompute_layer: LayerSpecs | None = setting(
        None, about="Layers that are computed again whole.", acts=HYPERPARALLEL
    )
    select_module: LayersByModule | None = setting(
        None, about="Modules that are computed again, with their layers.", acts=HYPERPARALLEL
    )
    exclude_op: tuple[str, ...] | LayersByModule | None = setting(
        None, about="Operators whose results are kept.", acts=HYPERPARALLEL
    )


@frozen
class RecomputeComm:
    """The same for the results of collectives."""

    enable: bool = setting(False, about="Do the same for results of collectives.", acts=HYPERPARALLEL)
    select_module: LayersByModule | None = setting(
        None, about="Modules whose collectives are made again, with their layers.", acts=NOWHERE
    )


@frozen
class LayerSwap:
    """Layers whose activations wait in host memory."""

    layers: LayerSpecs = setting((), about="Layers whose activations wait in host memory.", acts=NOWHERE)


@frozen
class OpSwap:
    """An operator whose results wait in host memory, in these layers."""

    op_name: str = setting("", about="Operator whose results wait in host memory.", acts=NOWHERE)
    layers: LayerSpecs = setting((), about="Layers in which they do.", acts=NOWHERE)


@frozen
class Swap:
    """Activations kept in host memory until their backward pass."""

    enable: bool = setting(False, about="Let activations wait in host memory.", acts=HYPERPARALLEL)
    default_prefetch: int = setting(1, minimum=1, about="Layers ahead of which they are brought back.", acts=NOWHERE)
    layer_swap: tuple[LayerSwap, ...] = Factory(tuple)
    op_swap: tuple[OpSwap, ...] = Factory(tuple)
