"""Mixture-of-experts tokens to the ranks that hold their experts and back, with the gradients of both ways.

Arrays are NumPy's; `moe_dispatch.mindspore` has the same for MindSpore tensors, which this package does not import.
"""

from __future__ import annotations

from moe_dispatch.alltoall import AllToAllDispatcher
from moe_dispatch.deredundant import DeredundantDispatcher
from moe_dispatch.exchange import BytesSent
from moe_dispatch.layout import ExpertLayout
from moe_dispatch.load import ExpertLoad
from moe_dispatch.plan import Arrival, DispatchPlan, arrival, plan
from moe_dispatch.route import Route
from moe_dispatch.savings import RowsBetweenNodes, expected_nodes, rows_between_nodes

__all__ = [
    "AllToAllDispatcher",
    "Arrival",
    "BytesSent",
    "DeredundantDispatcher",
    "DispatchPlan",
    "ExpertLayout",
    "ExpertLoad",
    "Route",
    "RowsBetweenNodes",
    "arrival",
    "expected_nodes",
    "plan",
    "rows_between_nodes",
]
