"""Mixture-of-experts tokens to the ranks that hold their experts and back, with the gradients of both ways.

Arrays are NumPy's; `moe_dispatch.mindspore` has the same for MindSpore tensors, which this package does not import.
"""

from __future__ import annotations

from moe_dispatch.alltoall import AllToAllDispatcher
from moe_dispatch.deredundant import DeredundantDispatcher
from moe_dispatch.exchange import BytesSent
from moe_dispatch.layout import ExpertLayout
from moe_dispatch.plan import Arrival, DispatchPlan, arrival, plan
from moe_dispatch.route import Route

__all__ = [
    "AllToAllDispatcher",
    "Arrival",
    "BytesSent",
    "DeredundantDispatcher",
    "DispatchPlan",
    "ExpertLayout",
    "Route",
    "arrival",
    "plan",
]
