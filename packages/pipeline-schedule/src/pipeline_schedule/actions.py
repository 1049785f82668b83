"""What a rank does: one action for each computation, transfer and wait.

An action is a kind, a virtual stage and a micro-batch. A transfer is two actions, one on each end: what virtual
stage s sends forward is `send_activation` of stage s on its rank and `recv_activation` of stage s + 1 on the
other; what it sends back is `send_gradient` of stage s and `recv_gradient` of stage s - 1. So a send names the
stage that made the value and a receive names the stage that will use it.

Actions are named tuples, and not attrs classes as elsewhere, because schedules have millions of them: tuples are
made, compared and hashed in C.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple, TypeGuard

from attrs import field, frozen


class Kind(StrEnum):
    """The kinds of actions."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """The whole backward: gradients of the input and of the weights."""
    BACKWARD_INPUT = "backward_input"
    """The part of the backward that the previous stage waits for: the gradient of the input."""
    BACKWARD_WEIGHT = "backward_weight"
    """The rest of the backward: the gradients of the weights, from what was kept."""
    SEND_ACTIVATION = "send_activation"
    RECV_ACTIVATION = "recv_activation"
    SEND_GRADIENT = "send_gradient"
    RECV_GRADIENT = "recv_gradient"
    WAIT_SEND_ACTIVATION = "wait_send_activation"
    WAIT_RECV_ACTIVATION = "wait_recv_activation"
    WAIT_SEND_GRADIENT = "wait_send_gradient"
    WAIT_RECV_GRADIENT = "wait_recv_gradient"


class Action(NamedTuple):
    """One thing a rank does, for one micro-batch at one virtual stage. Both count from 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.microbatch})"


new_action: Callable[[tuple[Kind, int, int]], Action] = functools.partial(tuple.__new__, Action)
"""`Action` without its constructor, which is written in Python: in half of the time, where there are millions."""


class Overlap(NamedTuple):
    """A backward of one micro-batch and a forward of another that run beside each other on one rank."""

    backward: Action
    forward: Action

    def __str__(self) -> str:
        return f"{self.backward} beside {self.forward}"


def _transfers(transfers: Iterable[Action]) -> tuple[Action, ...]:
    return tuple(transfers)


@frozen
class Together:
    """Sends and receives that a rank posts at once, in this order, as `batch_isend_irecv` does.

    Each of them can begin as soon as its other end is posted, whatever becomes of the rest. Without `overlap_p2p` the
    rank goes on when all of them are over; with it at once, and each has a wait of its own.
    """

    transfers: tuple[Action, ...] = field(converter=_transfers)

    def __str__(self) -> str:
        return f"together({', '.join(map(str, self.transfers))})"


Step = Action | Overlap | Together
"""What a rank's program is made of."""

Computation = Action | Overlap
"""A step that computes."""

COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
"""The kinds that compute. Everything else moves a value between ranks or waits for that."""

FORWARDS = frozenset(
    {
        Kind.FORWARD,
        Kind.SEND_ACTIVATION,
        Kind.RECV_ACTIVATION,
        Kind.WAIT_SEND_ACTIVATION,
        Kind.WAIT_RECV_ACTIVATION,
    }
)
"""The kinds that there are where nothing goes backward."""

SENDS = {Kind.SEND_ACTIVATION: Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT: Kind.RECV_GRADIENT}
"""The kinds that send, and the kind of action on the other end."""

RECEIVES = {receive: send for send, receive in SENDS.items()}
"""The kinds that receive, and the kind of action on the other end."""

WAITS = {
    Kind.WAIT_SEND_ACTIVATION: Kind.SEND_ACTIVATION,
    Kind.WAIT_RECV_ACTIVATION: Kind.RECV_ACTIVATION,
    Kind.WAIT_SEND_GRADIENT: Kind.SEND_GRADIENT,
    Kind.WAIT_RECV_GRADIENT: Kind.RECV_GRADIENT,
}
"""The kinds that wait, and what they wait for."""

WAIT_FOR = {transfer: wait for wait, transfer in WAITS.items()}
"""The kinds that send or receive, and how to wait for them."""

_PARTNER = {
    Kind.SEND_ACTIVATION: (Kind.RECV_ACTIVATION, 1),
    Kind.RECV_ACTIVATION: (Kind.SEND_ACTIVATION, -1),
    Kind.SEND_GRADIENT: (Kind.RECV_GRADIENT, -1),
    Kind.RECV_GRADIENT: (Kind.SEND_GRADIENT, 1),
}


def partner(transfer: Action) -> Action:
    """The action on the other end of a send or a receive."""
    kind, stage, microbatch = transfer
    other, step = _PARTNER[kind]
    return new_action((other, stage + step, microbatch))


def transfer_of(action: Action) -> Action:
    """The send of the transfer that an action sends, receives or waits for: the same for both of its ends."""
    if action.kind in SENDS:
        return action
    if action.kind in WAITS:
        return transfer_of(Action(WAITS[action.kind], action.stage, action.microbatch))
    return partner(action)


def flat(steps: Iterable[Step]) -> Iterator[Action]:
    """The single actions of a program; of two that overlap, the forward first, since both are then alive."""
    for step in steps:
        if isinstance(step, Overlap):
            yield step.forward
            yield step.backward
        elif isinstance(step, Together):
            yield from step.transfers
        else:
            yield step


def is_compute(step: Step) -> TypeGuard[Computation]:
    """Whether a step computes."""
    return isinstance(step, Overlap) or (isinstance(step, Action) and step.kind in COMPUTE)


def holds(step: Step, action: Action) -> bool:
    """Whether a step is an action, or a group with it."""
    return step == action or (isinstance(step, Together) and action in step.transfers)
