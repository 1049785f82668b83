"""The comparison that `nox -s npu` makes on NPUs, made on CPUs; and that it fails where it has to."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import on_devices
import pytest
from cases import CASES, SCENARIOS, WORLDS
from memory_checks import even_routing
from on_devices import ALLOWED, LOSSES, Steps, difference, drawn, main
from parallel_config import load, loads
from parallel_trainer.job import Device, prepare
from parallel_trainer.trace import on_one_rank

SHARDED = "1x2x1x1-sum-default-acc3-float32-untied-kv2-plain"
DEEPSEEK = "1x2x2x2-ep8-.*deepseek_v3-top4of16"
PIPELINE = "pp2x1-1x1x1x1-sum-default-acc4-float32-untied-kv2-plain-4layers-batch36"
LINE = re.compile(r"^ *(\S+) +(\S+)  (equal|DIFFERENT) +(\S+)$", re.MULTILINE)
pytestmark = pytest.mark.timeout(1200)


def on_cpu(*names: str) -> Sequence[str]:
    return ["--device", "cpu", "--world-size", "2", "--cases", f"^({'|'.join(names)})$"]


def test_plans_under_msrun_equal_one_rank(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(on_cpu(SHARDED, PIPELINE)) == 0
    lines = LINE.findall(capfd.readouterr().out)
    assert {name: verdict for *_, verdict, name in lines} == dict.fromkeys((SHARDED, PIPELINE), "equal")
    # Two ranks add float32 in another order than one does: were all differences zero, nothing would be compared.
    largest = max(float(value) for loss, grad_norm, *_ in lines for value in (loss, grad_norm))
    assert 0 < largest < 1e-5


@pytest.mark.parametrize(("name", "factor"), [("loss", 1.0001), ("grad_norm", 1.001), ("loss", math.nan)])
def test_a_wrong_number_in_the_last_step_is_said_and_fails(
    name: str, factor: float, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    right = [{"loss": 4.0, "grad_norm": 0.3}, {"loss": 3.9, "grad_norm": 0.4}]
    wrong = [*right[:-1], right[-1] | {name: right[-1][name] * factor}]
    monkeypatch.setattr(on_devices, "alone", lambda file, world: right)
    monkeypatch.setattr(on_devices, "together", lambda file, world, device, engine: wrong)
    assert main(on_cpu(SHARDED)) == 1
    ((_, _, verdict, _),) = LINE.findall(capfd.readouterr().out)
    assert verdict == "DIFFERENT"
    monkeypatch.setattr(on_devices, "together", lambda file, world, device, engine: right)
    assert main(on_cpu(SHARDED)) == 0


def test_a_launch_that_fails_is_shown_and_the_next_plan_is_trained(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def msrun(folder: Path, workers: int, *program: str, seconds: float) -> subprocess.CompletedProcess[str]:
        if "plan-0.yaml" in " ".join(program):
            return subprocess.CompletedProcess(program, 1, "", "worker 1: no memory")
        raise subprocess.TimeoutExpired(program, seconds)

    monkeypatch.setattr(on_devices, "alone", lambda file, world: [])
    monkeypatch.setattr(on_devices, "msrun", msrun)
    assert main(on_cpu(SHARDED, PIPELINE)) == 1
    printed = capfd.readouterr().out
    assert printed.count("FAILED") == 2
    assert "worker 1: no memory" in printed
    assert "msrun did not end within 900 s and was ended" in printed
    assert printed.endswith("0 of 2 plans are equal to one rank.\n")


def test_a_pattern_that_names_no_plan_fails(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(on_cpu("no such plan")) == 1
    assert "0 of 0 plans" in capfd.readouterr().out


def test_bfloat16_is_for_npus(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*on_cpu(SHARDED), "--dtype", "bfloat16"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("--dtype bfloat16 is for NPUs")
    steps = [{"loss": 4.0, "grad_norm": 0.3}]
    asked: list[str] = []

    def together(file: Path, world: int, device: str, engine: str) -> Steps:
        asked.append(load(file).model.compute_dtype)
        return [{"loss": 4.0 * 1.009, "grad_norm": 0.3 * 1.09}]

    monkeypatch.setattr(on_devices, "alone", lambda file, world: steps)
    monkeypatch.setattr(on_devices, "together", together)
    name = SHARDED.replace("float32", "bfloat16")
    arguments = ["--device", "ascend", "--world-size", "2", "--cases", f"^{name}$"]
    assert main([*arguments, "--dtype", "bfloat16"]) == 0
    assert asked == ["bfloat16"]
    assert main([*arguments[:-1], f"^{SHARDED}$"]) == 1


def test_hyperparallel_trains_on_npus_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*on_cpu(SHARDED), "--engine", "hyperparallel"]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("--engine hyperparallel trains on NPUs alone.")
    launched: list[tuple[str, ...]] = []

    def msrun(folder: Path, workers: int, *program: str, seconds: float) -> subprocess.CompletedProcess[str]:
        launched.append(program)
        raise subprocess.TimeoutExpired(program, seconds)

    monkeypatch.setattr(on_devices, "alone", lambda file, world: [])
    monkeypatch.setattr(on_devices, "msrun", msrun)
    names = f"^({SHARDED}|1x1x2x1-colossal-zigzag-sum-default-acc3-float32-untied-kv8-padded)$"
    on_npus = ["--device", "ascend", "--world-size", "2", "--engine", "hyperparallel"]
    assert main([*on_npus, "--cases", names]) == 1
    assert "0 of 1 plans" in capfd.readouterr().out
    assert [program[-4:] for program in launched[:1]] == [
        ("--engine", "hyperparallel", "--output_dir", launched[0][-1])
    ]


def test_hyperparallel_takes_every_scenario(corpora: dict[str, str]) -> None:
    found = on_devices.files(8, "^(over|[0-9][.])", True, corpora, "hyperparallel")
    assert set(found) == {path.stem for path in SCENARIOS}


def test_scenarios_are_for_eight_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*on_cpu(SHARDED), "--scenarios"])
    assert ended.value.code == 2
    assert "--scenarios: the files are for 8 ranks, not --world-size 2." in capfd.readouterr().err


@pytest.mark.parametrize("world", WORLDS)
def test_a_draw_has_every_kind_of_plan_once_and_float32_alone(world: int) -> None:
    cases = drawn(world, None)
    assert sorted(case.dimensions for case in cases) == sorted({c.dimensions for c in CASES if c.world == world})
    assert {(case.world, case.model.dtype) for case in cases} == {(world, "float32")}


def test_scenarios_are_float32_and_cut_to_three_steps(corpora: dict[str, str]) -> None:
    found = {name: loads(text) for name, text in on_devices.files(8, "^(over|[0-9][.])", True, corpora).items()}
    assert found.keys() == {path.stem for path in SCENARIOS}
    assert {(c.model.params_dtype, c.model.compute_dtype, c.training.steps) for c in found.values()} == {
        ("float32", "float32", 3)
    }


def test_limits_on_ascend_have_room_for_attention_in_bfloat16(
    tmp_path: Path, corpora: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded on one rank, going in and coming out, forward and backward: less than half of the limits.

    Experts are chosen in turn: what rounding does alone, and not what a token does that it sends elsewhere.
    """
    import mask_compression.mindspore
    from mindspore import Tensor
    from mindspore.common import _Function

    def bfloat16(x: Tensor) -> Tensor:
        bits = np.ascontiguousarray(x.asnumpy()).view(np.uint32)
        to_even = bits + np.uint32(0x7FFF) + (bits >> 16 & 1)
        return Tensor.from_numpy((to_even & np.uint32(0xFFFF0000)).view(np.float32))

    class Rounded(_Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return bfloat16(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return bfloat16(gradient)

    attention = mask_compression.mindspore.attention

    def rounded_attention(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return Rounded.apply(attention(*map(Rounded.apply, (q, k, v)), *arguments, **options))

    file = tmp_path / "plan.yaml"
    (case,) = drawn(8, DEEPSEEK)
    file.write_text(case.yaml(corpora), encoding="utf-8")
    with even_routing():  # a choice of experts that rounding turns moves the numbers further than rounding itself
        exact = on_devices.alone(file, 8)
        monkeypatch.setattr(mask_compression.mindspore, "attention", rounded_attention)
        rounded = on_devices.alone(file, 8)
    cpu, ascend = ALLOWED["cpu"], ALLOWED["ascend"]
    assert cpu.loss < difference(exact, rounded, LOSSES) < ascend.loss / 2
    assert cpu.grad_norm < difference(exact, rounded, ("grad_norm",)) < ascend.grad_norm / 2


@pytest.mark.filterwarnings("ignore:Extensions of this project")
@pytest.mark.parametrize("device", ["cpu", "ascend"])
def test_every_file_can_be_trained_where_it_is(
    device: Device, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Read from where main is at work, both plans find their corpus and nothing in them is refused on the device."""

    def alone(file: Path, world: int) -> Steps:
        prepare(on_one_rank(load(file), world), 1)
        return [{"loss": 1.0, "grad_norm": 1.0}]

    def together(file: Path, world: int, device: Device, engine: str) -> Steps:
        return [{"loss": float(prepare(load(file), world, device=device).plan.world_size == 8), "grad_norm": 1.0}]

    monkeypatch.setattr(on_devices, "alone", alone)
    monkeypatch.setattr(on_devices, "together", together)
    assert main(["--device", device, "--world-size", "8", "--scenarios"]) == 0
    assert len(LINE.findall(capfd.readouterr().out)) == len(drawn(8, None)) + len(SCENARIOS)


@pytest.mark.parametrize(
    ("one", "many", "expected"),
    [
        ([{"loss": 4.0}, {"loss": -2.0}], [{"loss": 4.0}, {"loss": -2.5}], 0.25),
        ([{"loss": 4.0, "mtp_loss": 2.0}], [{"loss": 4.0, "mtp_loss": 3.0}], 0.5),
        ([{"loss": 4.0, "mtp_loss": None}], [{"loss": 4.0}], 0.0),
        ([{"loss": 4.0, "mtp_loss": 2.0}], [{"loss": 4.0}], math.nan),
        ([{"loss": 4.0}, {"loss": 1.0}], [{"loss": None}, {"loss": 2.0}], math.nan),
        ([{"loss": 0.0}], [{"loss": 0.125}], 0.125),
    ],
)
def test_the_largest_difference_is_relative_to_one_rank(one: Steps, many: Steps, expected: float) -> None:
    assert difference(one, many, ("loss", "mtp_loss")) == pytest.approx(expected, nan_ok=True)


def test_runs_of_different_lengths_are_not_compared() -> None:
    with pytest.raises(ValueError, match="shorter"):
        difference([{"loss": 1.0}] * 3, [{"loss": 1.0}] * 2, ("loss",))
