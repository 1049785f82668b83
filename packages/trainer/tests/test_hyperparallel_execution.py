"""Making the calls on a stand-in for HyperParallel 1.0 that has its signatures and records them.

The stand-in's meshes are NumPy's reshape of the ranks, so that groups can be compared with this project's own mesh.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from device_mesh import ParallelMesh
from mindspore import Tensor, nn
from parallel_config import load, plan
from parallel_trainer.engines.hyperparallel import runtime
from parallel_trainer.engines.hyperparallel.calls import Call, Module, Name, Parameter, Phase, Program, Use, parts
from parallel_trainer.engines.hyperparallel.contract import broken
from parallel_trainer.engines.hyperparallel.execute import Execution, imported
from parallel_trainer.engines.hyperparallel.program import program
from parallel_trainer.errors import UserError

ms.set_device("CPU")
SCENARIOS = sorted((Path(__file__).parents[3] / "docs" / "scenarios" / "specification").glob("*.yaml"))
WORLD = 8


class DeviceMesh:
    """Ranks on named axes; a part of it is the one that holds the current rank."""

    rank = 0

    def __init__(self, ranks: np.ndarray, names: tuple[str, ...]) -> None:
        self.ranks, self.mesh_dim_names = ranks, names

    @property
    def device_type(self) -> str:
        return "npu"

    @property
    def rank_list(self) -> tuple[int, ...]:
        return tuple(self.ranks.reshape(-1).tolist())

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        wanted = (names,) if isinstance(names, str) else names
        place = np.argwhere(self.ranks == self.rank)[0]
        index = tuple(
            slice(None) if name in wanted else at for name, at in zip(self.mesh_dim_names, place, strict=True)
        )
        return DeviceMesh(self.ranks[index], wanted)

    def get_group(self, mesh_dim: str | None = None) -> str:
        return f"group of {self.rank_list}"

    def _unflatten(
        self, dim: int, mesh_sizes: tuple, mesh_dim_names: tuple, backend_override: dict | None = None
    ) -> DeviceMesh:
        return DeviceMesh(self.ranks.reshape(mesh_sizes), mesh_dim_names)

    def _flatten(self, name: str | None = None, backend_override: dict | None = None) -> DeviceMesh:
        return DeviceMesh(self.ranks.reshape(-1), (name or "_".join(self.mesh_dim_names),))


class HSDPModule:
    """What a module is an instance of once it is sharded."""

    def set_reduce_op_type(self, reduce_op_type: str) -> None: ...
    def set_modules_to_forward_prefetch(self, modules: list) -> None: ...
    def set_modules_to_backward_prefetch(self, modules: list) -> None: ...
    def zero_grad(self) -> None: ...


class Stage:
    """A pipeline stage."""

    def __init__(
        self, submodule, stage_index, stage_num, device=None, group=None, src_stage=None, dst_stage=None,
        dyn_shape=False, has_backward=True, shared_parameters=None, mesh=None,
    ) -> None:  # fmt: skip
        self.submodule, self.stage_index, self.device, self.group, self.mesh = (
            submodule,
            stage_index,
            device,
            group,
            mesh,
        )

    def _get_layout_rank_list(self, layout, sender_rank=None):
        return ("whole stage",)


class Recorder:
    """A package hyper_parallel in which every call leaves its name and arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, tuple, dict]] = []
        self.patch = monkeypatch
        put, at = self.put, "hyper_parallel.core"
        put("hyper_parallel", "DeviceMesh", DeviceMesh)
        put("hyper_parallel", "PipelineStage", Stage)
        put("hyper_parallel", "DTensor", type("DTensor", (), {"from_local": staticmethod(lambda *of: of)}))
        put("hyper_parallel.platform.mindspore.autograd_compat", "enable_mindspore_backward_compat", lambda: None)
        put("hyper_parallel", "shard_module", lambda model, device_mesh, sharding_plan: model)
        put(f"{at}.shard.sharding_plan", "ShardingPlan", self.plan)
        put(f"{at}.dtensor.placement_types", "Shard", lambda dim: f"Shard({dim})")
        put(f"{at}.dtensor.placement_types", "Replicate", lambda: "Replicate()")
        put(f"{at}.fully_shard.api", "fully_shard", self.fully_shard)
        put(f"{at}.fully_shard.api", "HSDPModule", HSDPModule)
        put(f"{at}.fully_shard.api", "MixedPrecisionPolicy", self.policy)
        put(f"{at}.fully_shard.utils", "CPUOffloadPolicy", lambda pin_memory=True: "offload")
        style = {"apply": lambda self, module, device_mesh, q_proj=None, k_proj=None, v_proj=None: module}
        for name in ("ContextParallel", "AsyncContextParallel"):
            file = "context_parallel" if name == "ContextParallel" else "async_context_parallel"
            put(f"{at}.context_parallel.{file}", name, type(name, (), {"__init__": self.style, **style}))
        put(f"{at}.activation_checkpoint", "checkpoint_wrapper", self.checkpoint_wrapper)
        for name in ("Schedule1F1B", "ScheduleGPipe", "ScheduleInterleaved1F1B"):
            put(f"{at}.pipeline_parallel", name, self.schedule(name, overlap=name == "ScheduleInterleaved1F1B"))

        def init_device_mesh(device_type, mesh_shape, *, mesh_dim_names=None, rank_list=None, init_backend=True):
            return DeviceMesh(np.arange(np.prod(mesh_shape)).reshape(mesh_shape), mesh_dim_names)

        put("hyper_parallel", "init_device_mesh", init_device_mesh)

    def put(self, path: str, name: str, value: Any) -> None:
        names = path.split(".")
        for depth in range(1, len(names) + 1):
            inner = ".".join(names[:depth])
            if inner not in sys.modules:
                self.patch.setitem(sys.modules, inner, ModuleType(inner))
        self.patch.setattr(sys.modules[path], name, value, raising=False)

    @staticmethod
    def plan(plan=None, input_plan=None, output_plan=None, return_local_tensor=None):
        return plan, input_plan, output_plan

    @staticmethod
    def policy(param_dtype=None, reduce_dtype=None, output_dtype=None, cast_forward_inputs=True,
               apply_grad_on_fp32_main_grad=False):  # fmt: skip
        return param_dtype

    @staticmethod
    def style(self, seq_dim=1, head_dim=2, ulysses_degree=None, qkv_indices=(0, 1, 2), qkv_kwarg_names=(),
              use_local_output=False, load_balance=False):  # fmt: skip
        self.dims = seq_dim, head_dim, ulysses_degree

    def fully_shard(self, module, *, mesh=None, reshard_after_forward=True, shard_placement_fn=None, mp_policy=None,
                    offload_policy=None, ignored_params=None, replicate_params=None, comm_fusion=False,
                    comm_fusion_zero_copy=None):  # fmt: skip
        self.made.append(("fully_shard", (module,), {"mesh": mesh}))
        module.sharded_over = mesh.rank_list
        return module

    def checkpoint_wrapper(self, module, swap_inputs=False, policy_fn=None, context_fn=None, group_swap=None,
                           early_stop=True):  # fmt: skip
        return Part(inside=module)

    def schedule(self, name: str, *, overlap: bool) -> Any:
        made = self.made

        class Schedule:
            if overlap:

                def __init__(self, stages, micro_batch_num, args_batch_dim=None, kwargs_batch_dim=None,
                             output_concat_dim=None, swap=False, overlap_p2p=False, overlap_b_f=False,
                             enable_dxdw_split=False, p2p_transport="auto") -> None:  # fmt: skip
                    made.append((name, (stages, micro_batch_num), {}))
            else:

                def __init__(self, stages, micro_batch_num, args_batch_dim=None, kwargs_batch_dim=None,
                             output_concat_dim=None, swap=False) -> None:  # fmt: skip
                    made.append((name, (stages, micro_batch_num), {}))

            def run(self, *args, **kwargs):
                made.append(("run", args, kwargs))
                return []

        return Schedule


class Part:
    """A module of a stand-in model: parts by name; as a whole it returns a loss that records what goes back."""

    def __init__(self, made: list | None = None, **inner: Any) -> None:
        self.made = made
        self.__dict__.update(inner)

    def __call__(self, **inputs: Any) -> Part:
        self.made.append(("forward", (), inputs))
        return self

    def backward(self, gradient: Tensor) -> None:
        self.made.append(("backward", (float(gradient),), {}))

    def to_local(self) -> Tensor:
        return Tensor(np.array(7, np.float32))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("set_") or name in ("zero_grad", "split_over"):
            return lambda *arguments: self.made.append((name, arguments, {})) if self.made is not None else None
        raise AttributeError(name)


def stand_in(made: Program, calls: list) -> list[Part]:
    """Chunks with the modules and parameters that the program names."""
    chunks = [Part(calls) for _ in made.chunks]
    names = [part for call in made.calls for part in parts(call)]
    paths = [(each.chunk, each.name) for each in names if isinstance(each, Module)]
    paths += [(each.module.chunk, f"{each.module.name}.{each.name}") for each in names if isinstance(each, Parameter)]
    for chunk, path in paths:
        place = chunks[chunk]
        for name in path.split(".") if path else ():
            if name not in place.__dict__:
                place.__dict__[name] = Part()
            place = place.__dict__[name]
    return chunks


class Optimizer:
    def step(self, norm: float) -> None: ...


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "mindspore")
    monkeypatch.setattr("mindspore.mint.distributed.init_process_group", lambda backend="hccl": None)
    monkeypatch.setattr("mindspore.mint.distributed.all_reduce", lambda tensor, op="sum": None)
    monkeypatch.setattr(runtime, "squared_norm", lambda chunks, divisors: Tensor(np.zeros(1, np.float32)))
    monkeypatch.setattr(runtime, "clip", lambda chunks, squares, *, max_norm: 0.0)
    return Recorder(monkeypatch)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_runs_on_the_stand_in(path: Path, recorder: Recorder) -> None:
    """Each unit is sharded over the ranks of this project's own mesh, and a step is what the plan says."""
    config = load(path)
    made_plan = plan(config, WORLD)
    mesh = ParallelMesh(made_plan)
    for rank in range(WORLD):
        DeviceMesh.rank = rank
        made = program(config, WORLD, rank)
        chunks = stand_in(made, recorder.made)
        execution = Execution(
            made, chunks, {"batches": iter([{"input_ids": step} for step in range(9)]), "optimizer": Optimizer()}
        )
        recorder.made.clear()
        execution.set_up()
        views = {"data": mesh.views["dataloading"], "dense": mesh.views["dense"], "sparse": mesh.views["sparse"]}
        for view, axes in views.items():
            for axis in axes:
                assert execution._values[view][axis].rank_list == mesh.group(axis, rank), (view, axis, rank)
        assert execution._values["loss_mesh"].rank_list == mesh.group("loss", rank)
        for chunk in chunks:
            assert chunk.sharded_over == ranks_of(mesh, rank, ("dp_replicate", "fsdp"))
        experts = [args[0] for name, args, _ in recorder.made if name == "fully_shard" and is_experts(args[0], chunks)]
        for each in experts:
            assert each.sharded_over == ranks_of(mesh, rank, ("dp_replicate", "efsdp"))
        assert bool(experts) == (made_plan.ep > 1)
        recorder.made.clear()
        execution.step()
        made_calls = [name for name, _, _ in recorder.made]
        seeds = [args[0] for name, args, _ in recorder.made if name == "backward"]
        if made_plan.pp == 1:
            steps = made_plan.num_accumulation_steps
            assert made_calls.count("forward") == steps
            assert seeds == [1 / WORLD / steps] * steps
        else:
            assert made_calls[0] == "run"
            assert seeds == []
        assert made_calls[-len(chunks) :] == ["zero_grad"] * len(chunks)


def ranks_of(mesh: ParallelMesh, rank: int, names: tuple[str, ...]) -> tuple[int, ...]:
    """Ranks that differ from this one on these axes alone, slowest axis first."""
    outer, inner = names
    return tuple(other for first in mesh.group(outer, rank) for other in mesh.group(inner, first))


def is_experts(module: Part, chunks: list[Part]) -> bool:
    layers = [layer for chunk in chunks for layer in chunk.model.layers.__dict__.values() if isinstance(layer, Part)]
    return any(module is getattr(getattr(layer, "mlp", None), "experts", None) for layer in layers)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_calls_fit_the_signatures_of_the_stand_in(path: Path, recorder: Recorder) -> None:
    for rank in (0, WORLD - 1):
        assert broken(program(load(path), WORLD, rank).calls) == ()


@pytest.mark.skipif(find_spec("hyper_parallel") is None, reason="hyper_parallel is not installed: see docs/ascend.md")
def test_calls_fit_the_installed_hyperparallel() -> None:
    os.environ["HYPER_PARALLEL_PLATFORM"] = "mindspore"
    assert [problem for path in SCENARIOS for problem in broken(program(load(path), WORLD).calls)] == []


@pytest.mark.parametrize(
    ("path", "name", "instead", "said"),
    [
        ("hyper_parallel.core.fully_shard.api", "fully_shard", lambda module, *, mesh=None: module, "mp_policy"),
        ("hyper_parallel", "shard_module", None, "hyper_parallel has no shard_module"),
        ("hyper_parallel", "PipelineStage", lambda submodule, stage_index, stage_num: None, "device"),
        ("hyper_parallel", "DeviceMesh", type("DeviceMesh", (DeviceMesh,), {"device_type": None}), "is no property"),
        ("hyper_parallel.core.pipeline_parallel", "ScheduleInterleaved1F1B", lambda stages, n: None, "overlap_p2p"),
    ],
)
def test_a_signature_that_changed_is_found(path: str, name: str, instead: Any, said: str, recorder: Recorder) -> None:
    if instead is None:
        recorder.patch.delattr(sys.modules[path], name)
    else:
        recorder.put(path, name, instead)
    config = load(next(path for path in SCENARIOS if path.stem == "4.4-1-even-stages"))
    found = broken(program(config, WORLD).calls)
    assert any(said in problem for problem in found), found


def small(*calls: Call) -> Program:
    return Program({}, (0,), (Phase("all", calls),), (), ())


def test_a_missing_module_is_named_before_any_call_is_made(recorder: Recorder) -> None:
    shard = Name("hyper_parallel.core.fully_shard.api.fully_shard")
    made = small(Call(shard, (Module("model.norm"),)), Call(shard, (Module("lm_head"),)))
    with pytest.raises(UserError, match=r"no modules of names[^-]*- lm_head \(chunk 0\)"):
        Execution(made, [Part(model=Part(norm=Part()))])
    assert recorder.made == []


def test_a_wrapper_takes_the_place_of_a_module_and_inner_ones_are_still_found(recorder: Recorder) -> None:
    wrapper = Name("hyper_parallel.core.activation_checkpoint.checkpoint_wrapper")
    shard = Name("hyper_parallel.core.fully_shard.api.fully_shard")
    layer = Module("model.layers.1")
    mesh = {"mesh": Use("mesh")}
    made = small(
        Call(wrapper, (layer,), result=layer), Call(shard, (layer.inner("norm"),), mesh), Call(shard, (layer,), mesh)
    )
    inner, outer = Part(), Part()
    outer.__dict__["norm"] = inner
    chunk = Part(model=Part(layers=[Part(), outer]))
    Execution(made, [chunk], {"mesh": DeviceMesh(np.arange(2), ("fsdp",))}).set_up()
    assert chunk.model.layers[1].inside is outer
    assert [args[0] for _, args, _ in recorder.made] == [inner, chunk.model.layers[1]]


def test_a_framework_that_was_chosen_before_is_refused(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")
    made = Program({"HYPER_PARALLEL_PLATFORM": "mindspore"}, (0,), (), (), ())
    with pytest.raises(UserError, match="HYPER_PARALLEL_PLATFORM is 'torch', and hyper_parallel has been imported"):
        Execution(made, [Part()])


def test_without_hyperparallel_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hyper_parallel", None)
    with pytest.raises(UserError, match=r"has to be installed.*build\.sh --multicore off"):
        Execution(small(), [Part()])


def test_a_name_that_does_not_exist_is_said() -> None:
    with pytest.raises(ImportError, match=r"os\.path has no joint"):
        imported(Name("os.path.joint"))
    with pytest.raises(ImportError, match="no_such_package"):
        imported(Name("no_such_package.inner.name"))


def test_last_stage_sends_back_the_scale_and_finds_tp(recorder: Recorder) -> None:
    tp = DeviceMesh(np.array([4, 5]), ("tp",))
    stage = runtime.scaled_stage(Stage, loss_scale=0.25, tp=tp)(submodule=None, stage_index=0, stage_num=2)
    loss = Tensor(np.array(7, np.float32))
    alone = stage.get_last_stage_sens(loss)
    assert (alone.shape, float(alone)) == ((), 0.25)
    whole = Part(to_local=lambda: loss)  # on both ranks of tp: its own seed would be 1/2
    assert [float(seed) for seed in stage.get_last_stage_sens([loss, whole])] == [0.25, 0.25]
    assert stage._get_layout_rank_list(Part(alias_name=("tp",))) == (4, 5)
    assert stage._get_layout_rank_list(Part(alias_name=("fsdp", "tp"))) == ("whole stage",)


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Cell()
        self.model.layers = nn.CellList([nn.Cell(), nn.Cell()])
        for number, layer in enumerate(self.model.layers):
            layer.norm = nn.Cell()
            layer.norm.weight = ms.Parameter(Tensor(np.zeros(2, np.float32)), name=f"w{number}")


def test_norm_and_clipping_are_numpys_whether_in_main_grad_or_grad() -> None:
    net = Net()
    gradients = [np.array([3, 4], np.float32), np.array([6, 8], np.float32)]
    for (_, parameter), name, gradient in zip(
        net.parameters_and_names(), ("main_grad", "grad"), gradients, strict=True
    ):
        object.__setattr__(parameter, name, Tensor(gradient.copy()))
    squares = runtime.squared_norm([net], {"model.layers.*.norm.weight": 5})
    np.testing.assert_allclose(squares.asnumpy(), [(9 + 16 + 36 + 64) / 5])
    assert runtime.clip([net], squares, max_norm=10.0) == pytest.approx(5.0)
    assert runtime.clip([net], squares, max_norm=1.0) == pytest.approx(5.0)
    left = [
        getattr(parameter, name).asnumpy()
        for parameter, name in zip(net.get_parameters(), ("main_grad", "grad"), strict=True)
    ]
    np.testing.assert_allclose(left, np.array(gradients) / 5, rtol=1e-5)


def test_parameters_are_the_same_after_they_were_moved() -> None:
    net = Net()
    parameters = net.trainable_params()
    parameters[0].requires_grad = False
    before = [parameter.asnumpy().copy() for parameter in parameters]
    runtime.move_to("CPU", [net])
    after = list(net.get_parameters())
    assert [id(parameter) for parameter in after] == [id(parameter) for parameter in parameters]
    assert [parameter.requires_grad for parameter in after] == [False, True]
    np.testing.assert_array_equal([parameter.asnumpy() for parameter in after], before)


def test_modules_of_a_cell_are_found_by_name(recorder: Recorder) -> None:
    net = Net()
    made = small(Call(Name("builtins.id"), (Module("model.layers.1.norm"),), result="found"))
    execution = Execution(made, [net])
    execution.set_up()
    assert execution._values["found"] == id(net.model.layers[1].norm)
