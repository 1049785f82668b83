"""The executor: plain numbers on one rank, and a chain of functions trained on threads that send each other values."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from attrs import Factory, define, evolve
from pipeline_schedule import (
    Action,
    Callbacks,
    Executor,
    Kind,
    Message,
    Schedule,
    generate,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    overlap_b_f,
    overlap_p2p,
    peak_activations,
    post_together,
    zb_v,
)

Log = list[tuple[Any, ...]]


def recording(log: Log) -> Callbacks:
    """Callbacks that write down what they get; a forward adds 1, a backward doubles."""

    def forward(stage: int, microbatch: int, x: float | None) -> float:
        log.append(("forward", stage, microbatch, x))
        return 1 + (100 * microbatch if x is None else x)

    def backward(stage: int, microbatch: int, gradient: float | None) -> float:
        log.append(("backward", stage, microbatch, gradient))
        return 2 * (1 if gradient is None else gradient)

    return Callbacks(forward=forward, backward=backward, backward_input=backward, backward_weight=lambda s, m: None)


def test_one_rank_hands_values_over_directly() -> None:
    log: Log = []
    losses = Executor(interleaved_1f1b(1, 3, 2), 0, recording(log)).run()
    assert losses == {0: 3, 1: 103}
    assert [entry for entry in log if entry[2] == 1] == [
        ("forward", 0, 1, None),
        ("forward", 1, 1, 101),
        ("forward", 2, 1, 102),
        ("backward", 2, 1, None),
        ("backward", 1, 1, 2),
        ("backward", 0, 1, 4),
    ]


def test_messages_of_one_rank() -> None:
    """The middle rank of three: what it sends and receives, and that it returns no losses."""
    log: Log = []

    def recv(message: Message) -> float:
        log.append(("recv", message))
        return 50 if message.kind == "activation" else 7

    callbacks = evolve(recording(log), send=lambda message, value: log.append(("send", message, value)), recv=recv)
    assert Executor(one_f_one_b(3, 1), 1, callbacks).run() == {}
    assert log == [
        ("recv", Message("activation", 0, 1, 0, 0, 1)),
        ("forward", 1, 0, 50),
        ("send", Message("activation", 1, 2, 0, 1, 2), 51),
        ("recv", Message("gradient", 2, 1, 0, 2, 1)),
        ("backward", 1, 0, 7),
        ("send", Message("gradient", 1, 0, 0, 1, 0), 14),
    ]


# A chain of scalar functions, x -> tanh(w x), 24 layers cut into virtual stages, and a squared error as the loss.

LAYERS = 24
START = [0.9 + 0.05 * math.sin(layer) for layer in range(LAYERS)]
INPUTS = [0.3 * math.cos(5 * m) + 0.8 for m in range(17)]
TARGETS = [0.1 * m for m in range(17)]


def reference(weights: list[float], microbatches: int) -> tuple[float, list[float]]:
    """Loss and gradients without a pipeline: reverse accumulation over the whole chain."""
    loss, gradients = 0.0, [0.0] * LAYERS
    for m in range(microbatches):
        kept = [INPUTS[m]]
        for weight in weights:
            kept.append(math.tanh(weight * kept[-1]))
        loss += (kept[-1] - TARGETS[m]) ** 2
        gradient = 2 * (kept[-1] - TARGETS[m])
        for layer in reversed(range(LAYERS)):
            slope = gradient * (1 - kept[layer + 1] ** 2)
            gradients[layer] += slope * kept[layer]
            gradient = slope * weights[layer]
    return loss, gradients


def test_the_reference_is_right() -> None:
    """Against central differences."""
    _, gradients = reference(START, 3)
    for layer in (0, 11, LAYERS - 1):
        up, down = ([w + step * (i == layer) for i, w in enumerate(START)] for step in (1e-6, -1e-6))
        slope = (reference(up, 3)[0] - reference(down, 3)[0]) / 2e-6
        assert gradients[layer] == pytest.approx(slope, rel=1e-6)


@define
class Pipe:
    """Messages from one rank to another, in order. A send is over when it is received."""

    sent: list[tuple[Message, Any]] = Factory(list)
    started: list[Message] = Factory(list)
    changed: threading.Condition = Factory(threading.Condition)

    def isend(self, message: Message, value: Any) -> Transfer:
        with self.changed:
            self.sent.append((message, value))
            self.changed.notify_all()
            return Transfer(self, len(self.sent) - 1)

    def irecv(self, message: Message) -> Transfer:
        with self.changed:
            self.started.append(message)
            self.changed.notify_all()
            return Transfer(self, len(self.started) - 1)


@define
class Transfer:
    """The nth message of a pipe: over when both of its ends are there."""

    pipe: Pipe
    number: int

    def wait(self) -> Any:
        pipe = self.pipe
        with pipe.changed:
            both = pipe.changed.wait_for(lambda: min(len(pipe.sent), len(pipe.started)) > self.number, timeout=120)
            assert both, "nobody came to the other end"
            message, value = pipe.sent[self.number]
            assert message == pipe.started[self.number]
            return value


class Network:
    """The pipes between all ranks, as callbacks."""

    def __init__(self, ranks: int) -> None:
        self.pipes = {(a, b): Pipe() for a in range(ranks) for b in range(ranks)}

    def isend(self, message: Message, value: Any) -> Transfer:
        return self.pipes[message.sender, message.receiver].isend(message, value)

    def irecv(self, message: Message) -> Transfer:
        return self.pipes[message.sender, message.receiver].irecv(message)

    def send(self, message: Message, value: Any) -> None:
        self.isend(message, value).wait()

    def recv(self, message: Message) -> Any:
        return self.irecv(message).wait()


class Worker:
    """One rank's layers of the chain."""

    def __init__(self, schedule: Schedule, rank: int, weights: list[float]) -> None:
        size = LAYERS // schedule.num_stages
        self.last = schedule.num_stages - 1
        self.layers = {stage: range(stage * size, (stage + 1) * size) for stage in schedule.stages[rank]}
        self.weights = weights
        self.gradients = dict.fromkeys((layer for layers in self.layers.values() for layer in layers), 0.0)
        self.kept: dict[tuple[int, int], list[float]] = {}
        self.slopes: dict[tuple[int, int], list[float]] = {}
        self.live = self.peak = 0

    def forward(self, stage: int, m: int, x: float | None) -> float:
        kept = [INPUTS[m] if x is None else x]
        for layer in self.layers[stage]:
            kept.append(math.tanh(self.weights[layer] * kept[-1]))
        self.kept[stage, m] = kept
        self.live += 1
        self.peak = max(self.peak, self.live)
        return (kept[-1] - TARGETS[m]) ** 2 if stage == self.last else kept[-1]

    def backward_input(self, stage: int, m: int, gradient: float | None) -> float:
        kept = self.kept[stage, m]
        flow = 2 * (kept[-1] - TARGETS[m]) if gradient is None else gradient
        slopes = []
        for layer, y in zip(reversed(self.layers[stage]), reversed(kept), strict=False):
            slopes.append(flow * (1 - y**2))
            flow = slopes[-1] * self.weights[layer]
        self.slopes[stage, m] = slopes[::-1]
        return flow

    def backward_weight(self, stage: int, m: int) -> None:
        kept, slopes = self.kept.pop((stage, m)), self.slopes.pop((stage, m))
        for layer, slope, x in zip(self.layers[stage], slopes, kept, strict=False):
            self.gradients[layer] += slope * x
        self.live -= 1

    def backward(self, stage: int, m: int, gradient: float | None) -> float:
        flow = self.backward_input(stage, m, gradient)
        self.backward_weight(stage, m)
        return flow

    def overlap(
        self, backward: Action, gradient: float | None, forward: Action, x: float | None
    ) -> tuple[float, float]:
        y = self.forward(forward.stage, forward.microbatch, x)
        both = self.backward if backward.kind is Kind.BACKWARD else self.backward_input
        return both(backward.stage, backward.microbatch, gradient), y

    def callbacks(self, network: Network) -> Callbacks:
        names = ("forward", "backward", "backward_input", "backward_weight", "overlap")
        transport = {name: getattr(network, name) for name in ("send", "recv", "isend", "irecv")}
        return Callbacks(**{name: getattr(self, name) for name in names}, **transport)


def train_step(schedule: Schedule, weights: list[float]) -> tuple[float, list[float], tuple[int, ...]]:
    """Loss, gradients and peaks of live activations of one step, each rank on a thread of its own."""
    network = Network(schedule.num_ranks)
    workers = [Worker(schedule, rank, weights) for rank in range(schedule.num_ranks)]
    results: dict[int, Any] = {}

    def work(rank: int) -> None:
        try:
            results[rank] = Executor(schedule, rank, workers[rank].callbacks(network)).run()
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(schedule.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    failed = [result for result in results.values() if isinstance(result, BaseException)]
    if failed:
        raise failed[0]
    losses = {m: loss for result in results.values() for m, loss in result.items()}
    assert sorted(losses) == list(range(schedule.microbatches))
    assert all(not worker.kept for worker in workers)
    gradients = {layer: value for worker in workers for layer, value in worker.gradients.items()}
    peaks = tuple(worker.peak for worker in workers)
    return sum(losses.values()), [gradients[layer] for layer in range(LAYERS)], peaks


CASES = [
    ("gpipe", 4, 5, 1),
    ("1f1b", 4, 1, 1),  # PUB-PP-03, row a; b to g follow
    ("1f1b", 4, 2, 1),
    ("1f1b", 4, 3, 1),
    ("1f1b", 4, 6, 1),
    ("interleaved", 2, 3, 2),
    ("interleaved", 4, 10, 2),
    ("1f1b", 4, 9, 1),
    ("interleaved", 4, 8, 2),
    ("interleaved", 4, 3, 2),  # row g
    ("interleaved", 4, 1, 3),
    ("interleaved", 2, 5, 3),
    ("interleaved", 8, 17, 3),
    ("zbh1", 4, 7, 1),
    ("zbv", 4, 9, 2),
    ("zbv", 3, 2, 2),
    ("zbv", 1, 2, 2),
]
VARIANTS: list[Callable[[Schedule], Schedule]] = [
    lambda schedule: schedule,
    overlap_p2p,
    overlap_b_f,
    lambda schedule: overlap_p2p(overlap_b_f(schedule)),
    post_together,
    lambda schedule: post_together(overlap_p2p(overlap_b_f(schedule))),
]


@pytest.mark.parametrize(
    "variant", VARIANTS, ids=["blocking", "overlap_p2p", "overlap_b_f", "both", "together", "all three"]
)
@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), CASES)
def test_training_on_threads_is_training_without_a_pipeline(
    name: str, stages: int, microbatches: int, chunks: int, variant: Callable[[Schedule], Schedule]
) -> None:
    schedule = variant(generate(name, stages, microbatches, chunks))
    piped, plain = list(START), list(START)
    for _ in range(3):
        loss, gradients, peaks = train_step(schedule, piped)
        expected_loss, expected = reference(plain, microbatches)
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        assert gradients == pytest.approx(expected, rel=1e-10)
        assert peaks == peak_activations(schedule)
        piped = [w - 0.05 * g for w, g in zip(piped, gradients, strict=True)]
        plain = [w - 0.05 * g for w, g in zip(plain, expected, strict=True)]
    assert piped != START


def test_pairs_are_done_in_turn_without_a_callback_for_them() -> None:
    schedule = overlap_b_f(interleaved_1f1b(1, 2, 3))
    log: Log = []
    assert Executor(schedule, 0, recording(log)).run() == {0: 2, 1: 102, 2: 202}
    assert len(log) == 12
    assert [entry[0] for entry in log[:5]] == ["forward", "forward", "backward", "forward", "backward"]


def test_an_error_names_the_step() -> None:
    def forward(stage: int, microbatch: int, x: object) -> object:
        raise RuntimeError("out of memory")

    callbacks = evolve(recording([]), forward=forward)
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        Executor(gpipe(1, 1), 0, callbacks).run()
    assert caught.value.__notes__ == ["in forward(stage 0, micro-batch 0), step 0 of rank 0 in GPipe"]


def test_what_is_missing_is_said_before_anything_runs() -> None:
    callbacks = recording([])
    with pytest.raises(ValueError, match=r"1F1B has send_activation\(.*\) on rank 0: it needs the callback send$"):
        Executor(one_f_one_b(2, 1), 0, callbacks)
    with pytest.raises(
        ValueError, match=r"overlap_p2p has send_activation\(.*\) on rank 0: it needs the callback isend$"
    ):
        Executor(overlap_p2p(one_f_one_b(2, 1)), 0, callbacks)
    with pytest.raises(ValueError, match=r"ZB-V has .* on rank 0: it needs the callback backward_weight"):
        Executor(zb_v(1, 1), 0, evolve(callbacks, backward_weight=None))
    Executor(gpipe(1, 1), 0, evolve(callbacks, backward_weight=None, backward_input=None))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="rank 2 is outside the schedule, which has ranks 0 to 1"):
        Executor(one_f_one_b(2, 1), 2, recording([]))
    with pytest.raises(ValueError, match="watchdog_seconds = 0 must be above 0, or None"):
        Executor(gpipe(1, 1), 0, recording([]), watchdog_seconds=0)


def stalled(schedule: Schedule, rank: int, callback: str) -> str:
    """What the watchdog reports while one callback of a rank waits for that report, without its seconds.

    A machine may be so slow that the watchdog reports other steps too.
    """
    reported = threading.Event()
    reports: list[str] = []

    def on_stall(report: str) -> None:
        if f" {callback}" in report.partition(" for ")[0]:
            reports.append(re.sub(r"[\d.]+ s;", "… s;", report))
            reported.set()

    def stall(*arguments: object) -> Any:
        assert reported.wait(timeout=120)
        return 1.0

    callbacks = evolve(recording([]), send=stall, recv=stall, isend=stall, irecv=stall)
    if callback not in ("send", "recv"):
        callbacks = evolve(recording([]), forward=stall)
    Executor(schedule, rank, callbacks, watchdog_seconds=0.05, on_stall=on_stall).run()
    return reports[0]


def test_the_watchdog_says_who_waits_for_whom() -> None:
    report = stalled(one_f_one_b(2, 1), 0, "send")
    assert report.startswith("rank 0 has been at send_activation(stage 0, micro-batch 0) (step 1) for … s;")
    assert report.endswith("s; it waits for recv_activation(stage 1, micro-batch 0), step 0 of rank 1")
    report = stalled(one_f_one_b(2, 1), 1, "recv")
    assert report.startswith("rank 1 has been at recv_activation(stage 1, micro-batch 0) (step 0) for … s;")
    assert report.endswith("s; it waits for send_activation(stage 0, micro-batch 0), step 1 of rank 0")


def test_the_watchdog_says_that_a_rank_computes() -> None:
    report = stalled(gpipe(1, 1), 0, "forward")
    assert report.startswith("rank 0 has been at forward(stage 0, micro-batch 0) (step 0) for … s;")
    assert report.endswith("s; it computes")


def test_the_watchdog_prints_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    seen = threading.Event()

    def forward(stage: int, microbatch: int, x: object) -> float:
        text = ""
        while "rank 0 has been at" not in text and not seen.wait(timeout=0.01):
            text += capfd.readouterr().err
        return 1.0

    Executor(gpipe(1, 1), 0, evolve(recording([]), forward=forward), watchdog_seconds=0.02).run()
    assert not [thread for thread in threading.enumerate() if thread.name == "pipeline-schedule watchdog"]
