"""Checking a schedule: that every micro-batch passes, in an order that works, with transfers that cannot block."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import Factory, define, field

from pipeline_schedule.actions import (
    COMPUTE,
    FORWARDS,
    RECEIVES,
    SENDS,
    WAIT_FOR,
    WAITS,
    Action,
    Kind,
    Overlap,
    Step,
    Together,
    flat,
    partner,
)
from pipeline_schedule.collector import collector_paused
from pipeline_schedule.deadlock import find_deadlock
from pipeline_schedule.memory import peak_activations
from pipeline_schedule.problems import Problem, ScheduleError
from pipeline_schedule.replay import Replay
from pipeline_schedule.schedule import Schedule

Inputs = Mapping[Kind, tuple[tuple[Kind, int], ...]]
"""The kinds of actions that a virtual stage may have, and for each the kind and stage of what must be done before."""


def validate(schedule: Schedule, *, forward_only: bool = False) -> tuple[int, ...]:
    """Check that a schedule computes a whole training step, or with `forward_only` all forwards, and cannot hang.

    - Every micro-batch passes every virtual stage forward once and then backward once, on the stage's rank; with
      `forward_only` there are no backwards.
    - Nothing is used before it was computed or received, and nothing sent before it was computed.
    - Every send has its receive, and two ranks send and receive what goes from one to the other in the same order.
    - No rank waits forever, even where each transfer begins only when both of its ends are there, and each rank does
      its transfers one by one, but for those that it posts `Together`.

    Returns:
        The peak number of live activations on each rank, as `peak_activations` counts them; with `forward_only` 0 for
        each, as no backward needs any.

    Raises:
        ScheduleError: with all problems found. The order of transfers is looked at when there are no others.
    """
    problems = find_problems(schedule, forward_only=forward_only)
    if problems:
        raise ScheduleError(tuple(problems))
    return (0,) * schedule.num_ranks if forward_only else peak_activations(schedule)


def find_problems(schedule: Schedule, *, forward_only: bool = False) -> list[Problem]:
    """What is wrong with a schedule; nothing if it is valid. The rules are those of `validate`."""
    if fault := _placement_fault(schedule):
        return [Problem(fault)]
    with collector_paused():
        check = _Check(schedule, forward_only)
        check.find_strangers()
        check.find_missing()
        check.find_disorder()
        if check.problems:
            return check.problems
        replay = Replay(schedule, compute_time=lambda step: 0, transfer_time=lambda send: 0)
        replay.run()
    deadlock = find_deadlock(replay)
    # One by one, messages that cross block both ranks; in groups they would be taken for each other.
    if deadlock is not None or check.has_groups:
        check.find_crossings()
    return check.problems or ([] if deadlock is None else [deadlock])


def _placement_fault(schedule: Schedule) -> str | None:
    ranks, stages = schedule.num_ranks, schedule.num_stages
    if not ranks or not stages or schedule.microbatches < 1:
        return (
            f"a schedule needs ranks, stages and micro-batches, and has {ranks}, {stages} and {schedule.microbatches}"
        )
    if unknown := sorted(set(schedule.placement) - set(range(ranks))):
        return f"the placement names rank {unknown[0]}, and there are programs for ranks 0 to {ranks - 1}"
    if idle := sorted(set(range(ranks)) - set(schedule.placement)):
        return f"the placement puts no virtual stage on rank {idle[0]}; each of the {ranks} ranks must hold one"
    return None


def _stage_inputs(schedule: Schedule, stage: int) -> Inputs:
    """What a virtual stage does for each micro-batch, and what must stand before that in its rank's program."""
    placement = schedule.placement
    before, after = stage - 1, stage + 1
    has_before, has_after = before >= 0, after < len(placement)
    receives = has_before and placement[before] != placement[stage]
    sends = has_after and placement[after] != placement[stage]
    forward: tuple[tuple[Kind, int], ...] = ()
    backward: tuple[tuple[Kind, int], ...] = ((Kind.FORWARD, stage),)
    inputs: dict[Kind, tuple[tuple[Kind, int], ...]] = {}
    if receives:
        inputs[Kind.RECV_ACTIVATION] = ()
        inputs[Kind.SEND_GRADIENT] = ((Kind.BACKWARD, stage), (Kind.BACKWARD_INPUT, stage))
        forward = ((Kind.RECV_ACTIVATION, stage),)
    elif has_before:
        forward = ((Kind.FORWARD, before),)
    if sends:
        inputs[Kind.RECV_GRADIENT] = ()
        inputs[Kind.SEND_ACTIVATION] = ((Kind.FORWARD, stage),)
        backward += ((Kind.RECV_GRADIENT, stage),)
    elif has_after:
        backward += ((Kind.BACKWARD, after), (Kind.BACKWARD_INPUT, after))
    if schedule.overlap_p2p:
        inputs |= {WAIT_FOR[kind]: ((kind, stage),) for kind in inputs}
        forward = tuple((WAIT_FOR.get(kind, kind), at) for kind, at in forward)
        backward = tuple((WAIT_FOR.get(kind, kind), at) for kind, at in backward)
    inputs[Kind.FORWARD] = forward
    inputs[Kind.BACKWARD] = inputs[Kind.BACKWARD_INPUT] = backward
    inputs[Kind.BACKWARD_WEIGHT] = ((Kind.BACKWARD_INPUT, stage),)
    return inputs


@define
class _Check:
    """The rules, each adding to `problems` what it finds."""

    schedule: Schedule
    forward_only: bool
    problems: list[Problem] = Factory(list)
    inputs: list[Inputs] = field(init=False)
    positions: dict[tuple[Kind, int, int], int] = Factory(dict)
    """Where each action stands in the program of its rank."""
    has_groups: bool = False
    """Whether any transfers are posted together."""

    def __attrs_post_init__(self) -> None:
        inputs = (_stage_inputs(self.schedule, stage) for stage in range(self.schedule.num_stages))
        kinds = FORWARDS if self.forward_only else frozenset(Kind)
        self.inputs = [{kind: needed for kind, needed in of_stage.items() if kind in kinds} for of_stage in inputs]

    def find_strangers(self) -> None:
        """Steps that stand where they cannot, and steps that stand twice. All others get their position."""
        microbatches = range(self.schedule.microbatches)
        homes = {
            (kind, stage, microbatch): rank
            for stage, rank in enumerate(self.schedule.placement)
            for kind in self.inputs[stage]
            for microbatch in microbatches
        }
        for rank, program in enumerate(self.schedule.programs):
            for position, step in enumerate(program):
                if isinstance(step, Overlap):
                    self._check_overlap(rank, position, step)
                for action in self._members(rank, position, step) if isinstance(step, Together) else _parts(step):
                    right_type = isinstance(action, Action) and isinstance(action.kind, Kind)
                    if right_type and homes.get(action) == rank and action not in self.positions:
                        self.positions[action] = position
                    else:
                        fault = self._why_strange(rank, action)
                        message = f"{action} is step {position} of rank {rank}, but {fault}"
                        self.problems.append(Problem(message, rank, position, step))

    def _members(self, rank: int, position: int, group: Together) -> list[Action]:
        """The transfers of a group."""
        self.has_groups = True
        transfers = [member for member in group.transfers if getattr(member, "kind", None) in _TRANSFERS]
        strange = [str(member) for member in group.transfers if member not in transfers]
        if not group.transfers:
            strange = ["nothing"]
        for what in strange:
            message = f"the group at step {position} of rank {rank} holds {what}: it must hold sends and receives"
            self.problems.append(Problem(message, rank, position, group))
        return transfers

    def _why_strange(self, rank: int, action: object) -> str:
        """Why something cannot stand in a rank's program."""
        if not isinstance(action, Action) or not isinstance(action.kind, Kind):
            return "a step must be an Action with a Kind (Kind.FORWARD, not 'forward'), an Overlap or some Together"
        schedule, (kind, stage, microbatch) = self.schedule, action
        if not 0 <= stage < schedule.num_stages:
            return f"the virtual stages are 0 to {schedule.num_stages - 1}"
        if not 0 <= microbatch < schedule.microbatches:
            return f"the micro-batches are 0 to {schedule.microbatches - 1}"
        if (home := schedule.placement[stage]) != rank:
            return f"stage {stage} is on rank {home}"
        if action in self.positions:
            return f"it already is step {self.positions[action]}; each action is done once"
        if self.forward_only and kind not in FORWARDS:
            return "with forward_only nothing goes backward"
        if kind in WAITS and not schedule.overlap_p2p:
            return "without overlap_p2p transfers are over when they return, and nothing waits for them"
        other = partner(Action(WAITS.get(kind, kind), stage, microbatch)).stage
        if not 0 <= other < schedule.num_stages:
            return f"stage {stage} is the {'first' if other < 0 else 'last'}, and there is no stage {other}"
        return f"stages {min(stage, other)} and {max(stage, other)} are both on rank {rank}, and nothing is sent"

    def _check_overlap(self, rank: int, position: int, step: Overlap) -> None:
        if step.forward.kind is not Kind.FORWARD or step.backward.kind not in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            message = f"{step} is step {position} of rank {rank}, but only a backward and a forward can overlap"
            self.problems.append(Problem(message, rank, position, step))

    def find_missing(self) -> None:
        """Actions that a whole training step, or all forwards, need and that no rank does."""
        for stage, rank in enumerate(self.schedule.placement):
            always = [kind for kind in self.inputs[stage] if kind not in _BACKWARDS]
            for microbatch in range(self.schedule.microbatches):
                there = [kind for kind in _BACKWARDS if (kind, stage, microbatch) in self.positions]
                if there != [Kind.BACKWARD] and not self.forward_only:
                    self._check_backward(rank, stage, microbatch, there)
                for kind in always:
                    if (kind, stage, microbatch) not in self.positions:
                        action = Action(kind, stage, microbatch)
                        self.problems.append(Problem(f"rank {rank} never does {action}", rank, None, action))

    def _check_backward(self, rank: int, stage: int, microbatch: int, there: list[Kind]) -> None:
        """A backward must be whole, or both of its halves."""
        if not there:
            action = Action(Kind.BACKWARD, stage, microbatch)
            self.problems.append(Problem(f"rank {rank} never does {action}", rank, None, action))
        elif Kind.BACKWARD in there:
            whole, half = (Action(kind, stage, microbatch) for kind in there[:2])
            position = self.positions[whole]
            message = f"rank {rank} does {whole} (step {position}) and also {half} (step {self.positions[half]})"
            self.problems.append(Problem(message, rank, position, whole))
        elif len(there) == 1:
            half = Action(there[0], stage, microbatch)
            lost = Action(Kind.BACKWARD_INPUT if there[0] is Kind.BACKWARD_WEIGHT else Kind.BACKWARD_WEIGHT, *half[1:])
            message = f"rank {rank} never does {lost}, but does {half} (step {self.positions[half]})"
            self.problems.append(Problem(message, rank, None, lost))

    def find_disorder(self) -> None:
        """Actions that do not stand after those whose result they need."""
        positions = self.positions
        for stage, inputs in enumerate(self.inputs):
            for kind, needed in inputs.items():
                for needed_kind, needed_stage in needed:
                    for microbatch in range(self.schedule.microbatches):
                        position = positions.get((kind, stage, microbatch), _LAST)
                        if positions.get((needed_kind, needed_stage, microbatch), -1) >= position:
                            self._add_disorder(
                                Action(kind, stage, microbatch), Action(needed_kind, needed_stage, microbatch)
                            )

    def _add_disorder(self, action: Action, needed: Action) -> None:
        rank = self.schedule.placement[action.stage]
        position, first = self.positions[action], self.positions[needed]
        place = "beside" if first == position else "before"
        message = f"{action} is step {position} of rank {rank}, {place} {needed} (step {first}), which it needs"
        self.problems.append(Problem(message, rank, position, action))

    def find_crossings(self) -> None:
        """Messages from one rank to another that are sent in one order and received in another."""
        placement = self.schedule.placement
        sent: dict[tuple[int, int], list[Action]] = {}
        received: dict[tuple[int, int], list[Action]] = {}
        for rank, program in enumerate(self.schedule.programs):
            for step in flat(program):
                if step.kind in WAITS or step.kind in COMPUTE:
                    continue
                other = partner(step)
                if step.kind in SENDS:
                    sent.setdefault((rank, placement[other.stage]), []).append(step)
                else:
                    received.setdefault((placement[other.stage], rank), []).append(other)
        for (sender, receiver), sends in sent.items():
            wanted = received[sender, receiver]
            if sends != wanted:
                send, want = next((send, want) for send, want in zip(sends, wanted, strict=True) if send != want)
                self._add_crossing(sender, receiver, send, want)

    def _add_crossing(self, sender: int, receiver: int, send: Action, want: Action) -> None:
        position, receive, late = self.positions[send], partner(want), partner(send)
        message = (
            f"rank {sender} does {send} (step {position}) before {want} (step {self.positions[want]}), but rank "
            f"{receiver} does {receive} (step {self.positions[receive]}) before {late} (step {self.positions[late]}); "
            "both ends must have the same order"
        )
        self.problems.append(Problem(message, sender, position, send))


def _parts(step: Step) -> tuple[Action, ...]:
    return step if isinstance(step, Overlap) else (step,)  # type: ignore[return-value]  # whatever it is


_TRANSFERS = frozenset({*SENDS, *RECEIVES})
_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_LAST = 2**62
