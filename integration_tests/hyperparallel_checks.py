"""What the double of HyperParallel computes on small modules, against closed forms in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from device_mesh import Communicator
from mindspore import Parameter, Tensor, mint, nn

Array = Any


class Linear(nn.Cell):
    """x @ weight.T of this rank's part of the weight."""

    def __init__(self, weight: Array) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(weight.copy()), name="weight")

    def construct(self, x: Tensor) -> Tensor:
        weight = self.weight
        return mint.matmul(x, (weight.to_local() if hasattr(weight, "to_local") else weight).T)


class Squares(nn.Cell):
    """The sum of squares of what two linear modules make of x in turn."""

    def __init__(self, first: Array, second: Array) -> None:
        super().__init__()
        self.first, self.second = Linear(first), Linear(second)

    def construct(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x)) ** 2).sum()


def squares(first: Array, second: Array, x: Array) -> tuple[float, Array, Array]:
    """The loss of `Squares` and its gradients by the two weights."""
    y = x @ first.T
    z = y @ second.T
    return float((z**2).sum()), (2 * z @ second).T @ x, (2 * z).T @ y


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"hyper_parallel{module and '.'}{module}"), name)


def _mesh(world: Communicator, **axes: int) -> Any:
    flat = _named("init_device_mesh")("npu", (world.size,), mesh_dim_names=("world",))
    return flat._unflatten(0, tuple(axes.values()), tuple(axes))


def _numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def _furthest(*pairs: tuple[Array, Array]) -> float:
    return max(float(np.abs(found - right).max() / np.abs(right).max()) for found, right in pairs)


def units_add_up(world: Communicator) -> dict[str, float]:
    """Two micro-batches through units of both kinds of reshard; by sum, and by the default for local parameters."""
    fully_shard = _named("core.fully_shard.api.fully_shard")
    first, second, x = _numbers(8, 3), _numbers(4, 8), _numbers(2 * world.size, 3)
    found = {}
    for op in ("sum", "default"):
        net, mesh = Squares(first, second), _mesh(world, fsdp=world.size)
        units = [fully_shard(net.first, mesh=mesh), fully_shard(net.second, mesh=mesh, reshard_after_forward=False)]
        for unit in [*units, fully_shard(net, mesh=mesh)] if op == "sum" else ():
            unit.set_reduce_op_type("sum")
        fully_shard(net, mesh=mesh) if op == "default" else None
        own = Tensor(np.split(x, world.size)[world.rank])
        for _ in range(2):
            net(own).backward(Tensor(np.array(0.25)))
        _, one, other = squares(first, second, x)
        factor = 0.5 if op == "sum" else 0.5 / world.size
        found[op] = _furthest(
            (net.first.weight.grad.asnumpy(), factor * np.split(one, world.size)[world.rank]),
            (net.second.weight.grad.asnumpy(), factor * np.split(other, world.size)[world.rank]),
        )
        net.zero_grad()
        assert net.first.weight.grad is None
    return found


def replicas_add_up(world: Communicator) -> dict[str, float]:
    """Gradients of two micro-batches, of shards with replicas and of rows that stay whole."""
    fully_shard, policy = (
        _named("core.fully_shard.api.fully_shard"),
        _named("core.fully_shard.api.MixedPrecisionPolicy"),
    )
    first, second, x = _numbers(8, 3), _numbers(5, 8), _numbers(2 * world.size, 3)
    net = Squares(first, second)
    mesh = _mesh(world, dp_replicate=2, fsdp=world.size // 2)
    fully_shard(net.first, mesh=mesh, mp_policy=policy(apply_grad_on_fp32_main_grad=True))
    fully_shard(net.second, mesh=mesh, replicate_params=[net.second.weight])
    fully_shard(net, mesh=mesh)
    for unit in (net.first, net.second):
        unit.set_reduce_op_type("sum")
    own = Tensor(np.split(x, world.size)[world.rank])
    for _ in range(2):
        net(own).backward(Tensor(np.array(1.0)))
    _, one, other = squares(first, second, x)
    shards = np.split(2 * one, world.size // 2)
    return {
        "shards": _furthest((net.first.weight.main_grad.asnumpy(), shards[world.rank % (world.size // 2)])),
        "whole": _furthest((net.second.weight.grad.asnumpy(), 2 * other)),
    }


class Parts(nn.Cell):
    """A scale that each rank uses on its rows, then a pair of matrices of which it has columns and rows."""

    def __init__(self, scale: Array, up: Array, down: Array) -> None:
        super().__init__()
        self.scale = Parameter(Tensor(scale.copy()), name="scale")
        self.mlp = Mlp(up, down)

    def construct(self, rows: Tensor) -> Tensor:
        distributed, partial, shard = (_named(f"core.dtensor.{name}") for name in _DTENSORS)
        mesh = self.mlp.mesh
        scaled = rows * self.scale.to_local()
        out = self.mlp(distributed.from_local(scaled, mesh, (shard(0),)))
        total = distributed.from_local((out.to_local() ** 2).sum(), mesh, (partial(),))
        return total.redistribute(mesh, (_named("core.dtensor.placement_types.Replicate")(),)).to_local()


_DTENSORS = ("dtensor.DTensor", "placement_types.Partial", "placement_types.Shard")


class Mlp(nn.Cell):
    """Its plan gathers rows before it and adds its summands up to rows after it."""

    mesh: Any

    def __init__(self, up: Array, down: Array) -> None:
        super().__init__()
        self.up, self.down = Linear(up), Linear(down)

    def construct(self, x: Any) -> Any:
        distributed, partial, _ = (_named(f"core.dtensor.{name}") for name in _DTENSORS)
        return distributed.from_local(self.down(self.up(x.to_local())), self.mesh, (partial(),))


def tensor_parallel_gradients(world: Communicator) -> dict[str, float]:
    """The loss is on every rank, so it goes back with 1 / ranks; what is replicated is added up by the unit."""
    shard, replicate = (_named(f"core.dtensor.placement_types.{name}") for name in ("Shard", "Replicate"))
    plan, fully_shard = _named("core.shard.sharding_plan.ShardingPlan"), _named("core.fully_shard.api.fully_shard")
    scale, up, down, x = _numbers(3), _numbers(8, 3), _numbers(3, 8), _numbers(2 * world.size, 3)
    net, mesh = Parts(scale, up, down), _mesh(world, fsdp=1, tp=world.size)
    net.mlp.mesh = mesh["tp"]
    placed = {"scale": (replicate(),), "mlp.up.weight": (shard(0),), "mlp.down.weight": (shard(1),)}
    sharding = plan(plan=placed, input_plan={"mlp.input": (replicate(),)}, output_plan={"mlp.output": (shard(0),)})
    _named("shard_module")(net, mesh["tp"], sharding)
    fully_shard(net, mesh=mesh["fsdp"])
    loss = net(Tensor(np.split(x, world.size)[world.rank]))
    loss.backward(Tensor(np.array(1 / world.size)))
    right, by_up, by_down = squares(up, down, x * scale)
    by_scale = ((2 * (x * scale @ up.T @ down.T) @ down @ up) * x).sum(axis=0)
    return {
        "loss": abs(float(loss) / right - 1),
        "cut": _furthest(
            (net.mlp.up.weight.grad.asnumpy(), np.split(by_up, world.size)[world.rank]),
            (net.mlp.down.weight.grad.asnumpy(), np.split(by_down, world.size, 1)[world.rank]),
        ),
        "replicated": _furthest((net.scale.grad.asnumpy(), by_scale)),
    }


class Chunk(nn.Cell):
    """A linear module; where it is the last, the sum of squares times the micro-batch's factor."""

    def __init__(self, weight: Array, *, last: bool) -> None:
        super().__init__()
        self.linear, self.last = Linear(weight), last

    def construct(self, *hidden: Tensor, x: Tensor, factor: Tensor) -> Tensor:
        out = self.linear(hidden[0] if hidden else x)
        return (out**2).sum() * factor[0] if self.last else out


def pipelines_add_up(world: Communicator) -> dict[str, float]:
    """1F1B, GPipe, and interleaved with two chunks a rank: sums over micro-batches, seeded by the program's stage."""
    from parallel_trainer.engines.hyperparallel.runtime import scaled_stage

    mesh, micro_batches, found = _mesh(world, pp=world.size), 2 * world.size + 1, {}
    for name, chunks in (("Schedule1F1B", 1), ("ScheduleGPipe", 1), ("ScheduleInterleaved1F1B", 2)):
        count = chunks * world.size
        weights = [_numbers(3, 3, seed=index) / 2 for index in range(count)]
        x = _numbers(2 * micro_batches, 3)
        factors = 1.0 + np.arange(micro_batches).repeat(2)
        indices = [chunk * world.size + world.rank for chunk in range(chunks)]
        modules = [Chunk(weights[index], last=index == count - 1) for index in indices]
        for module in modules:
            sharded = _named("core.fully_shard.api.fully_shard")(
                module, mesh=_mesh(world, pp=world.size, fsdp=1)["fsdp"]
            )
            sharded.set_reduce_op_type("sum")
        stage = scaled_stage(_named("PipelineStage"), loss_scale=0.5)
        stages = [
            stage(submodule=module, stage_index=index, stage_num=count, device="npu", group=mesh.get_group(), mesh=mesh)
            for module, index in zip(modules, indices, strict=True)
        ]
        losses = _named(f"core.pipeline_parallel.{name}")(stages, micro_batches).run(
            x=Tensor(x), factor=Tensor(factors)
        )
        hidden = [x]
        for weight in weights:
            hidden.append(hidden[-1] @ weight.T)
        gradient, by_weight = hidden[-1] * factors[:, None], [None] * count  # 0.5 of the derivative of squares
        for index in reversed(range(count)):
            by_weight[index] = gradient.T @ hidden[index]
            gradient = gradient @ weights[index]
        found[name] = _furthest(
            *(
                (module.linear.weight.grad.asnumpy(), by_weight[index])
                for module, index in zip(modules, indices, strict=True)
            )
        )
        if losses:
            right = (hidden[-1] ** 2).sum(axis=1) * factors
            found[name] = max(
                found[name], _furthest((np.array(list(map(float, losses))), right.reshape(-1, 2).sum(axis=1)))
            )
    return found


class Same(nn.Cell):
    """What hands a tensor over."""

    def construct(self, x: Tensor) -> Tensor:
        return x * 1.0


class Core(nn.Cell):
    """Attention without a mask over what it is given, (B, S, heads, D)."""

    def construct(self, query: Any, key: Any, value: Any) -> Tensor:
        q, k, v = (mint.permute(each.to_local(), (0, 2, 1, 3)) for each in (query, key, value))
        weights = mint.softmax(mint.matmul(q, mint.permute(k, (0, 1, 3, 2))), -1)
        return mint.permute(mint.matmul(weights, v), (0, 2, 1, 3))


def contexts_give_whole_attention(world: Communicator) -> dict[str, float]:
    """The rank's part of attention over the whole sequence, and the gradients of its queries, keys and values."""
    mesh, found = _mesh(world, cp=world.size), {}
    values = [_numbers(2, 2 * world.size, 4, 3, seed=seed) / 2 for seed in range(3)]
    q, k, v = (np.moveaxis(each, 2, 1) for each in values)
    scores = q @ np.swapaxes(k, 2, 3)
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    out = weights @ v
    by_weights = 2 * out @ np.swapaxes(v, 2, 3)
    by_scores = weights * (by_weights - (by_weights * weights).sum(axis=-1, keepdims=True))
    right = [np.moveaxis(each, 1, 2) for each in (out, by_scores @ k, np.swapaxes(by_scores, 2, 3) @ q)]
    right.append(np.moveaxis(np.swapaxes(weights, 2, 3) @ (2 * out), 1, 2))
    styles = {"": "context_parallel.ContextParallel", "asynchronous ": "async_context_parallel.AsyncContextParallel"}
    for asynchronous, path in styles.items():
        for degree in [degree for degree in (1, 2, 4) if world.size % degree == 0 and (degree > 1 or not asynchronous)]:
            core, handoffs = Core(), {f"{name}_proj": Same() for name in "qkv"}
            style = _named(f"core.context_parallel.{path}")(seq_dim=1, head_dim=2, ulysses_degree=degree)
            style.apply(core, mesh, **(handoffs if asynchronous else {}))
            own = [Tensor(np.split(each, world.size, 1)[world.rank].copy()) for each in values]
            for each in own:
                each._requires_grad = True
            result = core(*(handoff(each) for handoff, each in zip(handoffs.values(), own, strict=True)))
            result = result.to_local() if hasattr(result, "to_local") else result
            (result**2).sum().backward()
            got = [result.asnumpy(), *(each.grad.asnumpy() for each in own)]
            found[f"{asynchronous}{degree}"] = _furthest(
                *((one, np.split(other, world.size, 1)[world.rank]) for one, other in zip(got, right, strict=True))
            )
    return found


def what_is_refused(world: Communicator) -> dict[str, str]:
    """What the library does not take, or this double does not model, and the beginning of what is said."""
    shard, partial = (_named(f"core.dtensor.placement_types.{name}") for name in ("Shard", "Partial"))
    distributed, mesh = _named("core.dtensor.dtensor.DTensor"), _mesh(world, tp=world.size)
    net = Squares(_numbers(3, 3), _numbers(3, 3))
    loss = net(Tensor(_numbers(2, 3)))
    tensor = distributed.from_local(Tensor(_numbers(2, 3)), mesh, (shard(0),))
    tried: dict[str, Callable[[], Any]] = {
        "a number as gradient": lambda: loss.backward(1.0),
        "an operator on a DTensor": lambda: tensor * 2,
        "uneven rows": lambda: _named("core.fully_shard.api.fully_shard")(net, mesh=mesh),
        "an axis without a group": lambda: (
            _named("init_device_mesh")("npu", (world.size,), mesh_dim_names=("world",))
            ._unflatten(0, (world.size, 1), ("tp", "cp"), {"cp": "fake"})
            .get_group("cp")
        ),
        "another sum": lambda: partial("max"),
    }
    said = {}
    for name, attempt in tried.items():
        try:
            attempt()
            said[name] = "nothing"
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            said[name] = str(error)
    return said


CHECKS = (
    units_add_up,
    replicas_add_up,
    tensor_parallel_gradients,
    pipelines_add_up,
    contexts_give_whole_attention,
    what_is_refused,
)
