"""Communicators by axis name: this rank's group on each axis of a mesh."""

from __future__ import annotations

from attrs import define, field

from device_mesh.communicator import Communicator
from device_mesh.mesh import Axis, ParallelMesh
from device_mesh.traffic import Traffic


@define(eq=False)
class AxisCommunicators:
    """`comms["fsdp"]` is the communicator of this rank's group on that axis.

    A group's communicator is made on first use, by its members alone, and kept; axes with the same groups
    share one. A group of one rank needs no connection.

    Args:
        mesh: the mesh.
        communicator: all ranks of the mesh, as `connect` returns them.
        traffic: writes down every call under the axis name that it was made by; nothing is counted if left out.

    Raises:
        ValueError: the communicator's size is not the mesh's world size.
    """

    mesh: ParallelMesh
    communicator: Communicator = field(repr=False)
    traffic: Traffic | None = field(default=None, repr=False)
    _made: dict[Axis, Communicator] = field(factory=dict, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.communicator.size != self.mesh.world_size:
            raise ValueError(
                f"{self.communicator.size} ranks were started, but the plan's degrees multiply to "
                f"{self.mesh.world_size}: start {self.mesh.world_size} ranks, or change the plan"
            )
        self._made[self.mesh.axis("world")] = self.communicator

    def __getitem__(self, axis: str) -> Communicator:
        """The communicator of this rank's group on `axis`. Raises ValueError for an unknown axis."""
        key = self.mesh.axis(axis)
        if key not in self._made:
            group = self.mesh.group(axis, self.communicator.rank)
            # Members may ask for one group by different names; they meet under the first name of its axis.
            tag = next(number for number, name in enumerate(self.mesh.axes) if self.mesh.axis(name) == key)
            self._made[key] = self.communicator.subgroup(group, tag=tag)
        made = self._made[key]
        return made if self.traffic is None else self.traffic.count(made, axis)
