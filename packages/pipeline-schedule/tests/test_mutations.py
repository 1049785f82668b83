"""A thousand changes of good schedules: each is judged by a naive machine, and `validate` must agree and name it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest
from attrs import evolve
from pipeline_schedule import Action, Kind, Overlap, Schedule, Step, find_problems, generate, overlap_b_f, overlap_p2p

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


class Broken(Exception):
    """The naive machine cannot go on."""


class Machine:
    """Ranks that hold values: a step uses up what it needs, which must lie on its rank; at the end nothing is left."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.last = schedule.num_stages - 1
        self.hands: list[set[object]] = [set() for _ in schedule.programs]
        self.queues: list[deque[tuple[str, int, int]]] = [deque() for _ in schedule.programs]
        self.arrived: list[set[Action]] = [set() for _ in schedule.programs]
        self.done: set[Action] = set()

    def works(self) -> bool:
        try:
            self.run()
        except Broken:
            return False
        count = self.schedule.num_stages * self.schedule.microbatches
        backwards = sum(action.kind in BACKWARDS for action in self.done)
        halves = {action[1:] for action in self.done if action.kind is Kind.BACKWARD_INPUT}
        weights = {action[1:] for action in self.done if action.kind is Kind.BACKWARD_WEIGHT}
        forwards = sum(action.kind is Kind.FORWARD for action in self.done)
        left = [*self.hands, *self.queues, *self.arrived]
        return forwards == backwards == count and halves == weights and not any(left)

    def run(self) -> None:
        position = [0] * len(self.hands)
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(self.schedule.programs):
                while position[rank] < len(program) and self.step(rank, program[position[rank]]):
                    position[rank] += 1
                    moved = True
        if any(at < len(program) for at, program in zip(position, self.schedule.programs, strict=True)):
            raise Broken

    def step(self, rank: int, step: Step) -> bool:
        """Do one step; False to try again later."""
        if isinstance(step, Overlap):
            if step.forward.kind is not Kind.FORWARD or step.backward.kind not in BACKWARDS:
                raise Broken
            taken = [self.take(rank, action) for action in step]
            for action, makes in zip(step, taken, strict=True):
                self.finish(rank, action, makes)
            return True
        if "wait" in step.kind:
            return self.wait(rank, step)
        if "send" in step.kind or "recv" in step.kind:
            return self.transfer(rank, step)
        self.finish(rank, step, self.take(rank, step))
        return True

    def use(self, rank: int, value: object) -> None:
        if value not in self.hands[rank]:
            raise Broken
        self.hands[rank].remove(value)

    def take(self, rank: int, action: Action) -> list[object]:
        """Use up what a computation needs; what it makes."""
        kind, stage, microbatch = action
        if not (0 <= stage <= self.last and 0 <= microbatch < self.schedule.microbatches) or action in self.done:
            raise Broken
        if self.schedule.placement[stage] != rank:
            raise Broken
        if kind is Kind.FORWARD:
            if stage > 0:
                self.use(rank, ("activation", stage, microbatch))
            made: list[object] = [("kept", stage, microbatch)]
            if stage < self.last:
                near = self.schedule.placement[stage + 1] == rank
                made.append(
                    ("activation", stage + 1, microbatch) if near else ("to send", "activation", stage, microbatch)
                )
            return made
        if kind is Kind.BACKWARD_WEIGHT:
            self.use(rank, ("half", stage, microbatch))
            return []
        self.use(rank, ("kept", stage, microbatch))
        if stage < self.last:
            self.use(rank, ("gradient", stage, microbatch))
        made = [("half", stage, microbatch)] if kind is Kind.BACKWARD_INPUT else []
        if stage > 0:
            near = self.schedule.placement[stage - 1] == rank
            made.append(("gradient", stage - 1, microbatch) if near else ("to send", "gradient", stage, microbatch))
        return made

    def finish(self, rank: int, action: Action, made: list[object]) -> None:
        self.done.add(action)
        self.hands[rank].update(made)

    def transfer(self, rank: int, action: Action) -> bool:
        if self.schedule.overlap_p2p:
            self.queue(rank, action)
            self.drain()
            return True
        if action in self.arrived[rank]:
            self.arrived[rank].remove(action)
            return True
        if not self.queues[rank]:
            self.queue(rank, action)
            self.drain()
        return False

    def queue(self, rank: int, action: Action) -> None:
        """Begin a transfer, named by what is moved, the stage that made it, and the micro-batch."""
        what = "activation" if "activation" in action.kind else "gradient"
        forward = 1 if what == "activation" else -1
        sends = "send" in action.kind
        made_by = action.stage if sends else action.stage - forward
        if not (0 <= made_by <= self.last and 0 <= made_by + forward <= self.last) or action in self.done:
            raise Broken
        placement = self.schedule.placement
        if placement[action.stage] != rank or placement[made_by] == placement[made_by + forward]:
            raise Broken
        if sends:
            self.use(rank, ("to send", what, made_by, action.microbatch))
        self.done.add(action)
        self.queues[rank].append((what, made_by, action.microbatch))

    def drain(self) -> None:
        """Move what stands first on both of its ranks."""
        placement = self.schedule.placement
        moved = True
        while moved:
            moved = False
            for rank, queue in enumerate(self.queues):
                if not queue:
                    continue
                what, made_by, microbatch = queue[0]
                used_by = made_by + 1 if what == "activation" else made_by - 1
                other = self.queues[placement[used_by]]
                if placement[made_by] != rank or not other or other[0] != queue[0]:
                    continue
                queue.popleft()
                other.popleft()
                self.arrived[rank].add(Action(Kind(f"send_{what}"), made_by, microbatch))
                self.arrived[placement[used_by]].add(Action(Kind(f"recv_{what}"), used_by, microbatch))
                if not self.schedule.overlap_p2p:
                    self.hands[placement[used_by]].add((what, used_by, microbatch))
                moved = True

    def wait(self, rank: int, action: Action) -> bool:
        transfer = Action(Kind(action.kind.removeprefix("wait_")), action.stage, action.microbatch)
        if not self.schedule.overlap_p2p or transfer not in self.done or action in self.done:
            raise Broken
        if transfer not in self.arrived[rank]:
            return False
        self.done.add(action)
        self.arrived[rank].remove(transfer)
        if "recv" in transfer.kind:
            self.hands[rank].add((transfer.kind.removeprefix("recv_"), action.stage, action.microbatch))
        return True


Programs = list[list[Step]]
Mutation = Callable[[Programs, random.Random], list[Step]]
"""Changes the programs; the steps that it moved or changed, before and after."""


def pick(programs: Programs, rng: random.Random) -> tuple[int, int]:
    rank = rng.choice([rank for rank, program in enumerate(programs) if program])
    return rank, rng.randrange(len(programs[rank]))


def drop(programs: Programs, rng: random.Random) -> list[Step]:
    rank, position = pick(programs, rng)
    return [programs[rank].pop(position)]


def double(programs: Programs, rng: random.Random) -> list[Step]:
    rank, position = pick(programs, rng)
    step = programs[rank][position]
    programs[rank].insert(rng.randrange(len(programs[rank]) + 1), step)
    return [step]


def move(programs: Programs, rng: random.Random) -> list[Step]:
    rank, position = pick(programs, rng)
    step = programs[rank].pop(position)
    programs[rank].insert(rng.randrange(len(programs[rank]) + 1), step)
    return [step]


def move_a_little(programs: Programs, rng: random.Random) -> list[Step]:
    rank, position = pick(programs, rng)
    step = programs[rank].pop(position)
    programs[rank].insert(max(position + rng.choice([-2, -1, 1, 2]), 0), step)
    return [step]


def swap(programs: Programs, rng: random.Random) -> list[Step]:
    (rank, first), program = pick(programs, rng), programs
    second = rng.randrange(len(programs[rank]))
    steps = program[rank]
    steps[first], steps[second] = steps[second], steps[first]
    return [steps[first], steps[second]]


def move_to_another_rank(programs: Programs, rng: random.Random) -> list[Step]:
    rank, position = pick(programs, rng)
    step = programs[rank].pop(position)
    other = programs[(rank + rng.randrange(1, len(programs))) % len(programs)]
    other.insert(rng.randrange(len(other) + 1), step)
    return [step]


def change(programs: Programs, rng: random.Random, **to: object) -> list[Step]:
    rank, position = pick(programs, rng)
    step = programs[rank][position]
    if isinstance(step, Overlap):
        half = rng.choice(["forward", "backward"])
        changed: Step = step._replace(**{half: getattr(step, half)._replace(**to)})
    else:
        changed = step._replace(**to)  # type: ignore[arg-type]
    programs[rank][position] = changed
    return [step, changed]


def change_microbatch(programs: Programs, rng: random.Random) -> list[Step]:
    return change(programs, rng, microbatch=rng.randrange(-1, 7))


def change_stage(programs: Programs, rng: random.Random) -> list[Step]:
    return change(programs, rng, stage=rng.randrange(-1, 9))


def change_kind(programs: Programs, rng: random.Random) -> list[Step]:
    return change(programs, rng, kind=rng.choice(list(Kind)))


MUTATIONS: list[Mutation] = [
    drop,
    double,
    move,
    move_a_little,
    swap,
    move_to_another_rank,
    change_microbatch,
    change_stage,
    change_kind,
]
GOOD = [
    variant(generate(name, stages, microbatches, chunks))
    for name, stages, microbatches, chunks in [
        ("gpipe", 3, 3, 1),
        ("1f1b", 4, 5, 1),
        ("interleaved", 2, 3, 2),
        ("interleaved", 4, 5, 2),
        ("zbh1", 3, 4, 1),
        ("zbv", 3, 5, 2),
    ]
    for variant in (lambda schedule: schedule, overlap_p2p, overlap_b_f, lambda good: overlap_p2p(overlap_b_f(good)))
]


def halves(step: Step) -> list[str]:
    return [str(step), *(map(str, step) if isinstance(step, Overlap) else ())]


@pytest.mark.parametrize("good", GOOD, ids=lambda good: f"{good.name}, {good.num_ranks} x {good.microbatches}")
def test_the_naive_machine_runs_good_schedules(good: Schedule) -> None:
    assert Machine(good).works()
    assert find_problems(good) == []


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutants(mutation: Mutation) -> None:
    """At least 112 broken mutants of each of 9 kinds: more than 1,000."""
    rng = random.Random(mutation.__name__)
    broken = 0
    while broken < 112:
        good = rng.choice(GOOD)
        programs = [list(program) for program in good.programs]
        changed = mutation(programs, rng)
        mutant = evolve(good, programs=programs)
        problems = find_problems(mutant)
        if Machine(mutant).works():
            assert problems == []
            continue
        assert problems, changed
        told = "\n".join(problem.message for problem in problems)
        assert any(name in told for step in changed for name in halves(step)), (changed, told)
        broken += 1
