"""Cases from public bug reports: their values, their wrong answers, and what an error has to name."""

from __future__ import annotations

from typing import Any

import pytest
from parallel_config import ConfigError, ParallelPlan, TrainConfig, loads, plan


def config(**sections: dict[str, Any]) -> TrainConfig:
    """A configuration from sections, through YAML (JSON is YAML)."""
    import json

    return loads(json.dumps(sections))


def error(world_size: int, **sections: dict[str, Any]) -> str:
    """The text of the error that these sections give on so many ranks, at loading or at planning."""
    with pytest.raises(ConfigError) as caught:
        plan(config(**sections), world_size)
    return str(caught.value)


@pytest.mark.parametrize(
    ("world_size", "degrees", "expected"),
    [
        (6, {"tensor_parallel": 2, "pipeline_parallel": 3}, (1, 1, 1, 1, None)),
        (8, {"tensor_parallel": 4, "expert_parallel": 2}, (2, 1, 2, 2, 4)),
        (12, {"tensor_parallel": 2, "expert_parallel": 4}, (6, 1, 6, 6, 3)),
        (12, {"tensor_parallel": 2, "expert_parallel": 12}, (6, 1, 6, 6, 1)),
    ],
)
def test_pub_cfg_01_values(world_size: int, degrees: dict[str, int], expected: tuple[int | None, ...]) -> None:
    found = ParallelPlan.from_degrees(world_size, **degrees)
    *dense, efsdp = expected
    assert [found.data_parallel, found.dp_replicate, found.dp_shard, found.fsdp] == dense
    assert efsdp in (None, found.efsdp)


@pytest.mark.parametrize(
    ("world_size", "degrees", "names"),
    [
        (8, {"tensor_parallel": 2, "pipeline_parallel": 3}, ["8", "tensor_parallel", "pipeline_parallel"]),
        (2, {"tensor_parallel": 4}, ["2", "tensor_parallel"]),
        (24, {"tensor_parallel": 4, "pipeline_parallel": 4}, ["24", "tensor_parallel", "pipeline_parallel"]),
        (12, {"tensor_parallel": 2, "expert_parallel": 8}, ["expert_parallel", "8", "12"]),
        (8, {"tensor_parallel": 4, "expert_parallel": 16}, ["expert_parallel", "16", "8"]),
    ],
)
def test_pub_cfg_01_errors(world_size: int, degrees: dict[str, int], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelPlan.from_degrees(world_size, **degrees)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize(
    ("world_size", "parallelism", "expected"),
    [
        (8, {"data_parallel_shard": 4}, (8, 2, 4, 4)),
        (8, {"data_parallel_shard": 8}, (8, 1, 8, 8)),
        (16, {"tensor_parallel": 2, "context_parallel": 2, "data_parallel_shard": 2}, (4, 2, 2, 4)),
        (16, {"context_parallel": 4, "data_parallel_shard": 1}, (4, 4, 1, 4)),
        (
            32,
            {
                "tensor_parallel": 2,
                "pipeline_parallel": 2,
                "data_parallel_shard": 4,
                "pipeline_parallel_layers_per_stage": "auto",
            },
            (8, 2, 4, 4),
        ),
        (
            8,
            {
                "tensor_parallel": 2,
                "context_parallel": 2,
                "pipeline_parallel": 2,
                "pipeline_parallel_layers_per_stage": "auto",
                "data_parallel_shard": -1,
            },
            (1, 1, 1, 2),
        ),
    ],
)
def test_pub_cfg_02_values(world_size: int, parallelism: dict[str, Any], expected: tuple[int, int, int, int]) -> None:
    found = plan(config(parallelism=parallelism), world_size)
    assert (found.data_parallel, found.dp_replicate, found.dp_shard, found.fsdp) == expected
    assert found.fsdp_enabled


@pytest.mark.parametrize(
    ("world_size", "parallelism", "names"),
    [
        (12, {"data_parallel_shard": 8}, ["8", "12"]),
        (8, {"tensor_parallel": 2, "data_parallel_shard": 8}, ["8", "4"]),
        (8, {"data_parallel_shard": 3}, ["3", "8"]),
        (8, {"data_parallel_shard": 0}, ["0"]),
        (8, {"data_parallel_shard": -2}, ["-2"]),
    ],
)
def test_pub_cfg_02_errors(world_size: int, parallelism: dict[str, int], names: list[str]) -> None:
    text = error(world_size, parallelism=parallelism)
    assert "data_parallel_shard" in text
    assert all(name in text for name in names)


def test_pub_cfg_03_accumulation() -> None:
    training = {"local_batch_size": 2, "global_batch_size": 24}
    found = plan(config(parallelism={"tensor_parallel": 2}, training=training), 8)
    assert found.num_accumulation_steps == 3
    assert found.num_accumulation_steps * found.data_parallel * found.local_batch_size == 24


@pytest.mark.parametrize(
    ("local", "total", "names"),
    [(2, 20, ["global_batch_size", "20", "8"]), (4, 8, ["global_batch_size", "local_batch_size", "8", "16"])],
)
def test_pub_cfg_03_errors(local: int, total: int, names: list[str]) -> None:
    training = {"local_batch_size": local, "global_batch_size": total}
    text = error(8, parallelism={"tensor_parallel": 2}, training=training)
    assert all(name in text for name in names)


@pytest.mark.parametrize(
    ("world_size", "pp", "coefficient"),
    [(1, 1, 1.0), (8, 1, 0.125), (8, 2, 0.25), (16, 2, 0.125), (16, 4, 0.25), (12, 2, 1 / 6)],
)
def test_pub_loss_02_coefficient(world_size: int, pp: int, coefficient: float) -> None:
    found = ParallelPlan.from_degrees(world_size, pipeline_parallel=pp)
    assert found.loss_scale == pytest.approx(coefficient, rel=1e-12)


def model(layers: int) -> dict[str, Any]:
    return {"model_type": "qwen3", "architectures": "Qwen3ForCausalLM", "num_hidden_layers": layers}


def stages(layers: int, pp: int, chunks: int, placement: Any, zero_bubble: str = "none") -> tuple[tuple[int, int], ...]:
    parallelism = {
        "pipeline_parallel_zero_bubble": zero_bubble,
        "pipeline_parallel": pp,
        "pipeline_parallel_interleave_num": chunks,
        "pipeline_parallel_layers_per_stage": placement,
    }
    return plan(config(parallelism=parallelism, model=model(layers)), pp).stage_layers


def test_pub_pp_01_interleaved() -> None:
    assert stages(8, 2, 2, "auto") == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_pub_pp_01_chunks_of_each_stage() -> None:
    ranges = stages(24, 4, 3, "auto")
    by_stage = [[list(range(first, last + 1)) for first, last in ranges[stage::4]] for stage in range(4)]
    assert by_stage == [
        [[0, 1], [8, 9], [16, 17]],
        [[2, 3], [10, 11], [18, 19]],
        [[4, 5], [12, 13], [20, 21]],
        [[6, 7], [14, 15], [22, 23]],
    ]


def test_pub_pp_01_one_stage() -> None:
    assert stages(8, 1, 1, None) == ((0, 7),)


@pytest.mark.parametrize(
    ("layers", "pp", "chunks", "placement", "names"),
    [
        (30, 4, 1, "auto", ["30", "4"]),
        (40, 8, 2, "auto", ["40", "16"]),
        (8, 2, 1, None, []),
        (2, 4, 1, "auto", ["2", "4"]),
    ],
)
def test_pub_pp_01_errors(layers: int, pp: int, chunks: int, placement: Any, names: list[str]) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_layers_per_stage") as caught:
        stages(layers, pp, chunks, placement)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize(
    ("layers", "chunks", "placement", "expected"),
    [
        (10, 2, ["0-1, 4-8", "2-3, 9"], ((0, 1), (2, 3), (4, 8), (9, 9))),
        (10, 2, ["0-1,4-8", " 2-3 , 9 "], ((0, 1), (2, 3), (4, 8), (9, 9))),
        (4, 1, ["0-2", 3], ((0, 2), (3, 3))),
    ],
)
def test_pub_pp_02_values(layers: int, chunks: int, placement: list[Any], expected: Any) -> None:
    assert stages(layers, 2, chunks, placement) == expected


@pytest.mark.filterwarnings("ignore:Extensions of this project")
@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("auto", ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))),
        (["0, 10-11", "1-3, 7-9", "4-5, 6"], ((0, 0), (1, 3), (4, 5), (6, 6), (7, 9), (10, 11))),
    ],
)
def test_a_v_goes_down_the_stages_and_up_again(placement: Any, expected: Any) -> None:
    assert stages(12, 3, 2, placement, "zbv") == expected
    found = ParallelPlan.from_degrees(
        6, pipeline_parallel=3, pipeline_parallel_interleave_num=2, pipeline_parallel_zero_bubble="zbv"
    )
    assert found.stage_ranks == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize(("pp", "chunks", "ranks"), [(1, 1, (0,)), (3, 1, (0, 1, 2)), (2, 3, (0, 1, 0, 1, 0, 1))])
def test_virtual_stages_go_round_the_physical_ones(pp: int, chunks: int, ranks: tuple[int, ...]) -> None:
    found = ParallelPlan.from_degrees(6, pipeline_parallel=pp, pipeline_parallel_interleave_num=chunks)
    assert found.stage_ranks == ranks


def test_without_pipelining_there_is_no_zero_bubble() -> None:
    found = ParallelPlan.from_degrees(2, pipeline_parallel_zero_bubble="zbv", pipeline_parallel_interleave_num=5)
    assert (found.zero_bubble, found.stage_ranks) == ("none", (0,))


@pytest.mark.filterwarnings("ignore:Extensions of this project")
def test_layers_listed_in_a_loop_are_wrong_in_a_v_and_the_list_that_keeps_their_numbers_is_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        stages(10, 2, 2, ["0-1, 4-8", "2-3, 9"], "zbv")
    assert "layers 4-8 are missing before virtual stage 2" in str(caught.value)
    assert all(problem.suggestion.endswith("['0-1, 9', '2-3, 4-8'].") for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("chunks", "placement", "names"),
    [
        (2, ["0-1, 4-8", "2-3, 10"], ["9", "10"]),
        (2, ["0-2, 4-8", "2-3, 9"], ["layer 2 is already placed"]),
        (2, ["0-4", "5-9"], ["pipeline_parallel_interleave_num", "2"]),
        (1, ["0-3", "4-6", "7-9"], ["3", "2"]),
        (1, ["1-4", "5-9"], ["layer 0 is missing"]),
        (1, ["0-4", "5-8"], ["layer 9 is missing"]),
        (1, ["4-0", "5-9"], ["4-0"]),
    ],
)
def test_pub_pp_02_errors(chunks: int, placement: list[str], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        stages(10, 2, chunks, placement)
    assert all(name in str(caught.value) for name in names)


def context_parallel(length: int, cp: int) -> ParallelPlan:
    sizes = {
        "model_type": "qwen3",
        "architectures": "Qwen3ForCausalLM",
        "seq_length": length,
        "use_attn_mask_compression": True,
    }
    return plan(config(parallelism={"context_parallel": cp}, model=sizes), cp)


@pytest.mark.parametrize(("length", "cp"), [(4096, 4), (12, 4)])
def test_pub_cp_01_cut_evenly(length: int, cp: int) -> None:
    """PUB-CP-01, rows d and e; mask-compression cuts them into equal parts."""
    assert context_parallel(length, cp).cp == cp


@pytest.mark.parametrize(("length", "cp"), [(2999, 4), (7, 2), (4098, 4)])
def test_pub_cp_01_errors(length: int, cp: int) -> None:
    """PUB-CP-01, rows a, b and c."""
    with pytest.raises(ConfigError) as caught:
        context_parallel(length, cp)
    for name in ("seq_length", str(length), "context_parallel", str(cp)):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("section", "line", "value"),
    [
        ("lr_scheduler", "learning_rate: 1e-5", 1e-5),
        ("lr_scheduler", "learning_rate: 1.e-5", 1e-5),
        ("parallelism", "context_parallel_async: off", False),
        ("parallelism", "ulysses_degree_in_cp: null", None),
        ("training", "global_batch_size: 1_024", 1024),
    ],
)
def test_pub_yaml_01_values(section: str, line: str, value: Any) -> None:
    kind = "  type: CosineWithWarmUpLR\n" if section == "lr_scheduler" else ""
    loaded = loads(f"{section}:\n{kind}  {line}\n")
    assert getattr(getattr(loaded, section), line.split(":")[0]) == value


def test_pub_yaml_01_method_in_any_case() -> None:
    loaded = loads("parallelism: {context_parallel: 2, context_parallel_method: Ulysses}")
    assert plan(loaded, 2).ulysses_degree == 2


def test_pub_yaml_01_auto_in_any_case() -> None:
    text = "parallelism: {pipeline_parallel: 2, pipeline_parallel_layers_per_stage: Auto}"
    assert plan(loads(text), 2).pp == 2


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ('cpu_offload: "False"', ["cpu_offload", "true or false"]),
        ("ulysses_degree_in_cp: None", ["ulysses_degree_in_cp", "null"]),
        ('tensor_parallel: "2"', ["tensor_parallel", "Write 2 without quotes"]),
        ("tensor_parallel: 2.0", ["tensor_parallel", "Write 2"]),
        ("tensor_parallel: 2.5", ["tensor_parallel", "2.5"]),
        ("tensor_parallel: True", ["tensor_parallel", "integer"]),
        ("tensor_parallel: 010", ["tensor_parallel", "octal", "8", "10"]),
        ("reshard_after_forward_policy: no", ["always", "never", "default"]),
        ("context_parallel_method: ulises", ["colossal", "ulysses", "hybrid"]),
    ],
)
def test_pub_yaml_01_errors(line: str, names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(f"parallelism:\n  {line}\n", filename="run.yaml")
    (problem,) = caught.value.problems
    assert problem.path == "parallelism." + line.split(":")[0]
    assert (problem.file, problem.line) == ("run.yaml", 2)
    assert problem.column == len(line.split(":")[0]) + 5
    assert all(name in str(problem) for name in names)
