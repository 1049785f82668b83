"""Running one rank's part of a schedule with any framework: the schedule says when, callbacks say how."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

from attrs import field, frozen

from pipeline_schedule.actions import (
    COMPUTE,
    SENDS,
    WAITS,
    Action,
    Kind,
    Overlap,
    Step,
    Together,
    flat,
    holds,
    is_compute,
    partner,
    transfer_of,
)
from pipeline_schedule.schedule import Schedule
from pipeline_schedule.watchdog import Watchdog


class Message(NamedTuple):
    """What goes from one rank to another: the output of a virtual stage, or the gradient of its input.

    The messages from one rank to another are sent and received in the same order, so a transport that keeps this
    order needs no tags.
    """

    kind: Literal["activation", "gradient"]
    from_stage: int
    to_stage: int
    microbatch: int
    sender: int
    """The rank that sends."""
    receiver: int
    """The rank that receives."""


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> Any:
        """Return when the transfer is over: the value of a receive; what a send returns is not used."""


@frozen(kw_only=True)
class Callbacks:
    """How a rank computes and communicates. Values are whatever the callbacks exchange: tensors, arrays, tuples.

    Attributes:
        forward: `(stage, microbatch, input) -> output`. The first virtual stage gets None and reads the data itself;
            what the last one returns (the loss, for example) is not sent on, and `Executor.run` returns it. What the
            backward will need is the callback's to keep.
        backward: `(stage, microbatch, gradient) -> gradient of the input`, adding up the weights' gradients. The last
            virtual stage gets None and starts from its loss; what the first one returns is not used.
        backward_input: like `backward`, but without the gradients of the weights.
        backward_weight: `(stage, microbatch)`: the gradients of the weights, after `backward_input` of the same.
        send: `(message, value)`: give a value to another rank; may return before it is received.
        recv: `(message) -> value`: wait for a value of another rank.
        isend: `(message, value) -> Pending`: start a send. The value is kept alive until its wait.
        irecv: `(message) -> Pending`: start a receive.
        overlap: `(backward action, gradient, forward action, input) -> (gradient of the input, output)`: a backward,
            or its input half, and a forward beside each other. Without it they are done one after the other.

    Neighbouring virtual stages on one rank hand their values over directly, without any callback in between.
    A callback that a schedule does not need may be left out: `send` and `recv` with `overlap_p2p` or one rank,
    `isend` and `irecv` without it and without transfers that are posted together, `backward` or its halves.
    """

    forward: Callable[[int, int, Any], Any]
    backward: Callable[[int, int, Any], Any] | None = None
    backward_input: Callable[[int, int, Any], Any] | None = None
    backward_weight: Callable[[int, int], None] | None = None
    send: Callable[[Message, Any], None] | None = None
    recv: Callable[[Message], Any] | None = None
    isend: Callable[[Message, Any], Pending] | None = None
    irecv: Callable[[Message], Pending] | None = None
    overlap: Callable[[Action, Any, Action, Any], tuple[Any, Any]] | None = None


def _print_stall(report: str) -> None:
    print(report, file=sys.stderr, flush=True)


@frozen
class Executor:
    """One rank of a pipeline.

    Args:
        schedule: the schedule, the same on all ranks. It is not validated here; `validate` does that.
        rank: which of its programs to run.
        callbacks: how to compute and communicate.
        watchdog_seconds: a step that takes longer than this is reported; None reports nothing.
        on_stall: gets the report, once for each such step, from another thread while the step still runs: print it,
            or end the job. By default it is printed to stderr.

    Raises:
        ValueError: a rank outside the schedule, a callback missing that the rank's program needs, or
            `watchdog_seconds` that is not above 0.
    """

    schedule: Schedule
    rank: int
    callbacks: Callbacks
    watchdog_seconds: float | None = field(default=None, kw_only=True)
    on_stall: Callable[[str], None] = field(default=_print_stall, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.rank < self.schedule.num_ranks:
            raise ValueError(f"rank {self.rank} is outside the schedule, which has ranks 0 to {self._last_rank}")
        if self.watchdog_seconds is not None and self.watchdog_seconds <= 0:
            raise ValueError(f"watchdog_seconds = {self.watchdog_seconds} must be above 0, or None for no watchdog")
        for step in self.schedule.programs[self.rank]:
            posted = self.schedule.overlap_p2p or isinstance(step, Together)
            for name in (_callback_name(action.kind, posted) for action in flat([step])):
                if name is not None and getattr(self.callbacks, name) is None:
                    what = f"{self.schedule.name} has {step} on rank {self.rank}"
                    raise ValueError(f"{what}: it needs the callback {name}")

    @property
    def _last_rank(self) -> int:
        return self.schedule.num_ranks - 1

    def run(self) -> dict[int, Any]:
        """Run the rank's program once.

        Returns:
            What the forward of the last virtual stage returned for each micro-batch; empty on ranks without it.

        Raises:
            Whatever a callback raises, with a note that names the step.
        """
        run = _Run(self.schedule, self.callbacks)
        program = self.schedule.programs[self.rank]
        with Watchdog(self.watchdog_seconds, self._stall_report, self.on_stall) as watchdog:
            for position, step in enumerate(program):
                watchdog.at(position)
                try:
                    run.do(step)
                except Exception as error:
                    error.add_note(f"in {step}, step {position} of rank {self.rank} in {self.schedule.name}")
                    raise
        return run.outputs

    def _stall_report(self, position: int, seconds: float) -> str:
        step = self.schedule.programs[self.rank][position]
        report = f"rank {self.rank} has been at {step} (step {position}) for {seconds:.3g} s"
        if is_compute(step):
            return f"{report}; it computes"
        return f"{report}; it waits for {' and '.join(map(self._other_end, flat([step])))}"

    def _other_end(self, action: Action) -> str:
        send = transfer_of(action)
        ends = {self.schedule.placement[end.stage]: end for end in (send, partner(send))}
        other, awaited = next((rank, end) for rank, end in ends.items() if rank != self.rank)
        place = next(place for place, step in enumerate(self.schedule.programs[other]) if holds(step, awaited))
        return f"{awaited}, step {place} of rank {other}"


def _callback_name(kind: Kind, posted: bool) -> str | None:
    """The callback that an action needs; None for a wait."""
    if kind in COMPUTE:
        return kind.value
    if kind in WAITS:
        return None
    return ("i" if posted else "") + ("send" if kind in SENDS else "recv")


class _Run:
    """The values that are on the rank during one run, and what each step does with them."""

    def __init__(self, schedule: Schedule, callbacks: Callbacks) -> None:
        self.placement = schedule.placement
        self.last_stage = schedule.num_stages - 1
        # The schedule's callbacks are there: the executor has checked it.
        self.callbacks: Any = callbacks
        self.overlap_p2p = schedule.overlap_p2p
        self.outputs: dict[int, Any] = {}
        self.activations: dict[tuple[int, int], Any] = {}
        self.gradients: dict[tuple[int, int], Any] = {}
        self.to_send: dict[Action, Any] = {}
        self.under_way: dict[Action, tuple[Pending, Any]] = {}

    def do(self, step: Step) -> None:
        """Do one step."""
        if isinstance(step, Overlap):
            self._overlap(step.backward, step.forward)
        elif isinstance(step, Together):
            self._post(step)
        elif step.kind is Kind.FORWARD:
            self._keep_output(step, self.callbacks.forward(step.stage, step.microbatch, self._input(step)))
        elif step.kind is Kind.BACKWARD:
            self._keep_gradient(step, self.callbacks.backward(step.stage, step.microbatch, self._gradient(step)))
        elif step.kind is Kind.BACKWARD_INPUT:
            self._keep_gradient(step, self.callbacks.backward_input(step.stage, step.microbatch, self._gradient(step)))
        elif step.kind is Kind.BACKWARD_WEIGHT:
            self.callbacks.backward_weight(step.stage, step.microbatch)
        elif step.kind in WAITS:
            self._finish(Action(WAITS[step.kind], step.stage, step.microbatch))
        elif self.overlap_p2p:
            self._start(step)
        elif step.kind in SENDS:
            self.callbacks.send(self._message(step), self.to_send.pop(step))
        else:
            self._keep_received(step, self.callbacks.recv(self._message(step)))

    def _overlap(self, backward: Action, forward: Action) -> None:
        if self.callbacks.overlap is None:
            self.do(backward)
            self.do(forward)
            return
        gradient, x = self._gradient(backward), self._input(forward)
        input_gradient, output = self.callbacks.overlap(backward, gradient, forward, x)
        self._keep_gradient(backward, input_gradient)
        self._keep_output(forward, output)

    def _input(self, forward: Action) -> Any:
        return self.activations.pop((forward.stage, forward.microbatch)) if forward.stage > 0 else None

    def _gradient(self, backward: Action) -> Any:
        last = backward.stage == self.last_stage
        return None if last else self.gradients.pop((backward.stage, backward.microbatch))

    def _keep_output(self, forward: Action, output: Any) -> None:
        _, stage, microbatch = forward
        if stage == self.last_stage:
            self.outputs[microbatch] = output
        elif self.placement[stage + 1] == self.placement[stage]:
            self.activations[stage + 1, microbatch] = output
        else:
            self.to_send[Action(Kind.SEND_ACTIVATION, stage, microbatch)] = output

    def _keep_gradient(self, backward: Action, gradient: Any) -> None:
        _, stage, microbatch = backward
        if stage == 0:
            return
        if self.placement[stage - 1] == self.placement[stage]:
            self.gradients[stage - 1, microbatch] = gradient
        else:
            self.to_send[Action(Kind.SEND_GRADIENT, stage, microbatch)] = gradient

    def _post(self, group: Together) -> None:
        for transfer in group.transfers:
            self._start(transfer)
        for transfer in () if self.overlap_p2p else group.transfers:
            self._finish(transfer)

    def _start(self, transfer: Action) -> None:
        message = self._message(transfer)
        if transfer.kind in SENDS:
            value = self.to_send.pop(transfer)
            self.under_way[transfer] = self.callbacks.isend(message, value), value
        else:
            self.under_way[transfer] = self.callbacks.irecv(message), None

    def _finish(self, transfer: Action) -> None:
        pending, _ = self.under_way.pop(transfer)
        value = pending.wait()
        if transfer.kind not in SENDS:
            self._keep_received(transfer, value)

    def _keep_received(self, receive: Action, value: Any) -> None:
        kept = self.activations if receive.kind is Kind.RECV_ACTIVATION else self.gradients
        kept[receive.stage, receive.microbatch] = value

    def _message(self, action: Action) -> Message:
        send = transfer_of(action)
        to = partner(send).stage
        kind: Literal["activation", "gradient"] = "activation" if send.kind is Kind.SEND_ACTIVATION else "gradient"
        sender, receiver = self.placement[send.stage], self.placement[to]
        return Message(kind, send.stage, to, send.microbatch, sender, receiver)
