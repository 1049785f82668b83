"""A plan as HyperParallel's calls: those of the specification's scenarios, what is refused, which engine is chosen."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from parallel_config import TrainConfig, load, loads
from parallel_trainer import run_mindformer
from parallel_trainer.cli import main, run
from parallel_trainer.engines.choice import VARIABLE, Choice, check_trains, choose
from parallel_trainer.engines.hyperparallel.calls import Call, Module, Name, Parameter, Program, Use, parts
from parallel_trainer.engines.hyperparallel.program import check, program
from parallel_trainer.engines.hyperparallel.refusals import unserved
from parallel_trainer.engines.hyperparallel.render import lines
from parallel_trainer.errors import UserError
from parallel_trainer.kernels import kernels
from parallel_trainer.models import build_model

SCENARIOS = sorted((Path(__file__).parents[3] / "docs" / "scenarios" / "specification").glob("*.yaml"))

# By scenario, lines of the first rank's program that the specification and the rules of HyperParallel decide.
LINES: dict[str, list[str]] = {
    "overview-one-device": ["(1, 1, 8, 1)", "backward(loss, 0.125)"],
    "1.4-a-fsdp": [
        'world = init_device_mesh("npu", (8,), mesh_dim_names=("world",))',
        'fully_shard(model, mesh=dense["fsdp"], mp_policy=policy_float32)',
        "# 1 / (world_size // pp) / micro-batches = 1 / 8 / 1",
        "backward(loss, 0.125)",
        'model.set_reduce_op_type("sum")',
        "model.model.layers[i + 1],",
    ],
    "1.4-b-hsdp": [
        "(1, 2, 4, 1)",
        'fully_shard(model, mesh=dense["dp_replicate", "fsdp"], mp_policy=policy_float32)',
        "backward(loss, 0.125)",
    ],
    "2.4-tensor": [
        'output_plan={"self_attn.output": (Shard(0),), "mlp.output": (Shard(0),)},',
        'model.split_over(dense["tp"])',
        "backward(loss, 0.0625)",
    ],
    "3.5-a-colossal": [
        "context_parallel = ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=1)",
        'context_parallel.apply(model.model.layers[i].self_attn.core_attention, data["cp"])',
        "(1, 1, 8, 1)",
    ],
    "3.5-a-colossal-packed": ["context_parallel = ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=1)"],
    "3.5-b-ulysses": ["context_parallel = ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=4)", "range(4)"],
    "3.5-c-hybrid": [
        "# hybrid: heads are exchanged among 2 neighbours, keys and values are gathered from 2 ranks",
        "context_parallel = ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=2)",
    ],
    "4.4-1-even-stages": [
        "schedule = ScheduleInterleaved1F1B(",
        "    overlap_p2p=True,",
        "    overlap_b_f=False,",
        '    p2p_transport="plain",',
        "for i in range(0, 2):",
        "for i in range(4, 6):",
        "stage_num=4,",
        'device=data["pp"].device_type,',
        'Stage = scaled_stage(PipelineStage, loss_scale=0.0625, tp=dense["tp"])',
        "schedule.run(**inputs)",
    ],
    "4.4-2-uneven-stages": ["# virtual stages 0, 2", "for i in range(4, 9):"],
    "5.4-a-experts": [
        "(1, 1, 4, 2)",
        'mesh=sparse["efsdp"]',
        'sparse["ep"],',
        'ShardingPlan(plan={"gate_up_proj": (Shard(0),), "down_proj": (Shard(0),)}),',
        "replicate_params=[model.model.layers[1].mlp.gate.e_score_correction_bias]",
    ],
    "5.4-b-experts-across-nodes": ["(1, 1, 2, 4)", "(alltoall_deredundancy)"],
}

# The order in which MindFormers applies dimensions.
ORDER = (
    "start",
    "meshes",
    "tensor",
    "expert",
    "context",
    "recomputed",
    "shards",
    "gradients",
    "fetched",
    "virtual",
    "sch",
)

QWEN = """model_type: qwen3, architectures: Qwen3ForCausalLM, vocab_size: 64, seq_length: 16, hidden_size: 32,
        intermediate_size: 48, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8,
        params_dtype: float32, compute_dtype: float32, use_attn_mask_compression: true"""
DEEPSEEK = """model_type: deepseek_v3, architectures: DeepseekV3ForCausalLM, vocab_size: 64, seq_length: 16,
        hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4, num_attention_heads: 4, q_lora_rank: 8,
        kv_lora_rank: 8, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 8, n_routed_experts: 8, n_group: 2,
        topk_group: 1, num_experts_per_tok: 2, moe_intermediate_size: 16, compute_dtype: bfloat16"""
PIPELINE = "pipeline_parallel: 2, pipeline_parallel_layers_per_stage: auto"


def config_of(parallelism: str = "", model: str = QWEN, more: str = "", batch: int = 8) -> TrainConfig:
    sizes = f"training: {{global_batch_size: {batch}, local_batch_size: 1}}"
    return loads(f"parallelism: {{{parallelism}}}\nmodel: {{{model}}}\n{sizes}\n{more}", filename="run.yaml")


def text(config: TrainConfig, world_size: int, rank: int = 0) -> str:
    return "\n".join(lines(program(config, world_size, rank)))


def called(made: Program, name: str) -> list[Call]:
    """Calls of this function or method."""
    found = []
    for call in made.calls:
        path = call.target.path if isinstance(call.target, Name) else getattr(call.target, "name", "")
        if path.rpartition(".")[2] == name:
            found.append(call)
    return found


def test_every_scenario_is_here() -> None:
    assert {path.stem for path in SCENARIOS} == set(LINES)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_calls_of_a_scenario(path: Path) -> None:
    config = load(path)
    shown = text(config, 8)
    assert [line for line in LINES[path.stem] if line not in shown] == []
    for rank in (0, 7):
        made = program(config, 8, rank)
        titles = [phase.title for phase in made.setup]
        assert titles == sorted(titles, key=lambda title: next(i for i, o in enumerate(ORDER) if title.startswith(o)))
        assert_wrapped_in_order(made)
        assert_each_element_counts_once(made, config)
        without = {call.result: call.keywords["backend_override"] for call in called(made, "_unflatten")}
        used = [part for call in made.calls if call.result != "loss_mesh" for part in parts(call)]
        used = [part for part in used if isinstance(part, Use) and part.axes]
        assert [use for use in used if not set(use.axes).isdisjoint(without[use.name])] == [], "an axis without group"


def assert_wrapped_in_order(made: Program) -> None:
    """What is inside comes before what is around it; each unit is reduced by sum; only units are fetched ahead."""
    wrapped = [call.arguments[0] for call in called(made, "fully_shard")]
    assert len(set(wrapped)) == len(wrapped)
    for place, module in enumerate(wrapped):
        around = [other for other in wrapped[:place] if module.chunk == other.chunk]
        assert not any(module.name.startswith(f"{other.name}.") or not other.name for other in around)
    summed = [call.target.of for call in called(made, "set_reduce_op_type")]
    assert sorted(map(str, summed)) == sorted(map(str, wrapped))
    for method in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        fetching = called(made, method)
        assert len({call.target.of for call in fetching}) == len(fetching), "a second list would replace the first"
        assert {module for call in fetching for module in call.arguments[0]} <= set(wrapped)


def assert_each_element_counts_once(made: Program, config: TrainConfig) -> None:
    """Over all ranks of a stage the gradient norm counts as many elements as a weight has, from the calls alone."""
    meshes = called(made, "_unflatten")
    sizes = {call.result: dict(zip(call.arguments[2], call.arguments[1], strict=True)) for call in meshes}
    ranks = math.prod(sizes["dense"].values()) // sizes["dense"]["pp"]
    placed = {}
    for call in called(made, "shard_module"):
        module, mesh, plan = call.arguments
        for name, (placement,) in plan.keywords["plan"].items():
            cut = placement.target.path.endswith("Shard")
            placed[module.chunk, f"{module.name}.{name}"] = sizes[mesh.name][mesh.axes[0]] if cut else 1
    units = {}
    for call in called(made, "fully_shard"):
        kept = [f"{each.module.name}.{each.name}" for each in call.keywords.get("replicate_params", [])]
        units[call.arguments[0]] = call.keywords["mesh"], kept
    divisors = called(made, "squared_norm")[0].arguments[1]
    counted = 0
    for weight in (weight for weight in build_model(config.model, kernels("cpu")).weights if weight.trainable):
        around = [unit for unit in units if unit.name and weight.name.startswith(f"{unit.name}.")]
        if not around:
            continue
        owner = max(around, key=lambda unit: len(unit.name))
        mesh, kept = units[owner]
        cut = placed.get((owner.chunk, weight.name), 1)
        parts = cut * (1 if weight.name in kept else sizes[mesh.name][mesh.axes[-1]])
        assert weight.shape[0] % parts == 0 or weight.tp_dim == 1, weight.name
        pattern = ".".join("*" if part.isdigit() else part for part in weight.name.split("."))
        assert ranks == parts * divisors[pattern], weight.name
        counted += 1
    assert counted > 8


DENSE_FIRST = f"{DEEPSEEK}, first_k_dense_replace: 1, num_nextn_predict_layers: 0"


@pytest.mark.parametrize(
    ("parallelism", "model", "world_size"),
    [
        ("tensor_parallel: 2", DENSE_FIRST, 4),  # experts that are not spread are whole on each rank of tp
        ("tensor_parallel: 2, expert_parallel: 2, data_parallel_shard: 2", DENSE_FIRST, 8),
        (f"{PIPELINE}, pipeline_parallel_interleave_num: 2, tensor_parallel: 2, expert_parallel: 2", DENSE_FIRST, 8),
        ("expert_parallel: 8", DENSE_FIRST, 8),
        ("tensor_parallel: 2, context_parallel: 2, data_parallel_shard: 2", QWEN, 16),
        (f"{PIPELINE}, data_parallel_shard: 4", QWEN, 16),
    ],
)
def test_dimensions_together(parallelism: str, model: str, world_size: int) -> None:
    config = config_of(parallelism, model, batch=16)
    for rank in range(0, world_size, world_size // 2):
        made = program(config, world_size, rank)
        assert_wrapped_in_order(made)
        assert_each_element_counts_once(made, config)


def test_one_chunk_without_overlap_is_1f1b_which_takes_no_flags() -> None:
    (plain,) = called(program(config_of(PIPELINE), 2), "Schedule1F1B")
    assert plain.arguments == ([Use("stage_0")], 8)
    assert plain.keywords == {}
    overlapping = program(config_of(f"{PIPELINE}, pipeline_parallel_overlap_p2p: true"), 2)
    assert called(overlapping, "ScheduleInterleaved1F1B")[0].keywords["overlap_p2p"] is True


def test_gpipe_is_the_librarys_own() -> None:
    (found,) = called(program(config_of(f"{PIPELINE}, pipeline_parallel_schedule: gpipe"), 2), "ScheduleGPipe")
    assert found.arguments == ([Use("stage_0")], 8)
    assert found.keywords == {}
    overlap = f"{PIPELINE}, pipeline_parallel_schedule: gpipe, pipeline_parallel_overlap_p2p: true"
    with pytest.raises(UserError, match=r"pipeline_parallel_overlap_p2p true must be false with .* gpipe"):
        program(config_of(overlap), 2)


def test_a_backward_overlaps_a_forward_where_every_chunk_exchanges_experts() -> None:
    sizes = f"{PIPELINE}, expert_parallel: 2, pipeline_parallel_overlap_b_f: true"
    for dense, overlaps in ((0, True), (2, False)):
        model = f"{DEEPSEEK}, first_k_dense_replace: {dense}, num_nextn_predict_layers: 0"
        for rank in (0, 2):
            made = program(config_of(sizes, model), 4, rank)
            found = called(made, "ScheduleInterleaved1F1B")
            assert [call.keywords["overlap_b_f"] for call in found] == ([True] if overlaps else [])
            assert any("overlap_b_f is left out" in note for note in made.notes) is not overlaps


def test_a_micro_batch_goes_back_with_its_share_of_the_world_and_the_step() -> None:
    made = program(config_of("data_parallel_shard: 2", batch=12), 4)
    each, _ = made.step
    assert each.times == 3
    assert [call.arguments for call in called(made, "backward")] == [(Use("loss"), 1 / 4 / 3)]


def test_logits_stay_split_for_a_loss_that_is_computed_so() -> None:
    for sizes, kept in (("tensor_parallel: 2", True), ("tensor_parallel: 2, enable_loss_parallel: true", False)):
        made = called(program(config_of(sizes), 2), "shard_module")
        (head,) = (call.arguments[2].keywords for call in made if call.arguments[0].name == "lm_head")
        assert ("output_plan" in head) is kept
        assert "input_plan" in head


@pytest.mark.parametrize(("vocabulary", "divides"), [(64, True), (61, False)])
def test_tables_that_stay_whole_give_a_rank_s_own_tokens_and_logits(vocabulary: int, divides: bool) -> None:
    config = config_of("tensor_parallel: 2", QWEN.replace("vocab_size: 64", f"vocab_size: {vocabulary}"))
    plans = {call.arguments[0].name: call.arguments[2].keywords for call in called(program(config, 2), "shard_module")}
    for table in ("model.embed_tokens", "lm_head"):
        assert ("output_plan" in plans[table]) is divides


def test_experts_see_a_rank_s_own_tokens_and_a_shared_one_sees_all() -> None:
    made = program(config_of("tensor_parallel: 2, expert_parallel: 2", f"{DENSE_FIRST}, n_shared_experts: 1"), 4)
    plans = {call.arguments[0].name: call.arguments[2].keywords for call in called(made, "shard_module")}
    assert set(plans["model.layers.0"]["input_plan"]) == {"self_attn.input", "mlp.input"}
    for kind in ("input", "output"):
        assert set(plans["model.layers.1"][f"{kind}_plan"]) == {f"self_attn.{kind}", f"mlp.shared_experts.{kind}"}


def test_norms_and_routers_stay_in_float32_and_experts_have_their_mesh() -> None:
    model = f"{DEEPSEEK}, first_k_dense_replace: 1, num_nextn_predict_layers: 0"
    made = program(config_of("tensor_parallel: 2, expert_parallel: 4, cpu_offload: true", model), 4)
    units = {call.arguments[0].name: call.keywords for call in called(made, "fully_shard")}
    assert units["model.layers.0"]["mp_policy"] == Use("policy_bfloat16")
    assert units["model.layers.0.input_layernorm"]["mp_policy"] == Use("policy_float32")
    assert units["model.layers.1.mlp.gate"]["mp_policy"] == Use("policy_float32")
    assert units["model.layers.1.mlp.experts"]["mesh"] == Use("sparse", ("efsdp",))
    assert units["model.layers.1.mlp.experts"]["mp_policy"] == Use("policy_bfloat16")
    assert "model.layers.0.mlp.gate" not in units
    assert all(keywords["offload_policy"] == Use("offload") for keywords in units.values())
    kinds = {call.result: call.keywords["param_dtype"] for call in called(made, "MixedPrecisionPolicy")}
    assert kinds == {"policy_bfloat16": Name("mindspore.bfloat16"), "policy_float32": Name("mindspore.float32")}


def test_rows_that_do_not_divide_are_kept_whole() -> None:
    """Norms of heads have 8 numbers for 16 shards; matrices have 16, 32 and 48 rows."""
    made = program(config_of("data_parallel_shard: 16", batch=16), 16)
    kept = {
        parameter for call in called(made, "fully_shard") for parameter in call.keywords.get("replicate_params", [])
    }
    first = Module("model.layers.0")
    assert {Parameter(first, f"self_attn.{name}_norm.weight") for name in "qk"} <= kept
    assert Parameter(first, "self_attn.q_proj.weight") not in kept
    assert Parameter(first, "mlp.gate_proj.weight") not in kept


def test_experts_are_cut_by_their_own_mesh() -> None:
    """8 experts over 4 ranks, 2 on each, go into 2 shards of experts; 4 shards of what is dense would not do."""
    made = program(config_of("tensor_parallel: 2, expert_parallel: 4", DENSE_FIRST), 8)
    units = [call for call in called(made, "fully_shard") if call.arguments[0].name.endswith("mlp.experts")]
    assert len(units) == 3
    assert not any("replicate_params" in call.keywords for call in units)


def test_blocks_follow_one_another_and_are_fetched_in_their_order() -> None:
    """Embedding, layers by number, norm, head, and the whole; forwards from each to the next, and backwards."""
    made = program(config_of(model=QWEN.replace("num_hidden_layers: 4", "num_hidden_layers: 12")), 2)
    layers = [f"model.layers.{number}" for number in range(12)]
    names = [call.arguments[0].name for call in called(made, "fully_shard")]
    blocks = ["model.embed_tokens", *layers, "model.norm", "lm_head", ""]
    assert [name for name in names if name in blocks] == blocks
    ahead, back = (
        {call.target.of.name: [module.name for module in call.arguments[0]] for call in called(made, method)}
        for method in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch")
    )
    assert ahead["model.embed_tokens"] == ["model.layers.0"]
    assert [ahead[layer][-1] for layer in layers] == [*layers[1:], "lm_head"]
    assert ahead[layers[-1]][-2] == "model.norm"
    assert back["lm_head"] == [layers[-1]]
    assert [back[layer][-1] for layer in layers] == ["model.embed_tokens", *layers[:-1]]
    assert all(f"{layer}.input_layernorm" in ahead[layer] for layer in layers)


def test_the_head_stays_gathered_unless_always() -> None:
    for policy, head, layer in (("default", False, True), ("always", True, True), ("never", False, False)):
        made = program(config_of(f"reshard_after_forward_policy: {policy}"), 2)
        units = {call.arguments[0].name: call.keywords for call in called(made, "fully_shard")}
        assert (units["lm_head"]["reshard_after_forward"], units["model.layers.0"]["reshard_after_forward"]) == (
            head,
            layer,
        )
        assert "reshard_after_forward" not in units["model.norm"]


def test_asynchronous_context_parallelism_names_the_producers() -> None:
    sizes = "context_parallel: 2, context_parallel_method: ulysses, context_parallel_async: true"
    made = program(config_of(sizes), 2)
    assert called(made, "AsyncContextParallel")[0].keywords == {"seq_dim": 1, "head_dim": 2, "ulysses_degree": 2}
    for call in called(made, "apply"):
        assert sorted(call.keywords) == ["k_proj", "q_proj", "v_proj"]


def test_recomputed_modules_are_wrapped_before_they_are_sharded() -> None:
    for recompute, names in (
        ("{mode: full, full_recompute_layer: [0, 2-3]}", ["0", "2", "3"]),
        ("{mode: select, select_module: {mlp: [1], self_attn.*: [1]}}", ["1.self_attn", "1.mlp"]),
    ):
        made = program(config_of(more=f"recompute: {recompute}"), 2)
        found = called(made, "checkpoint_wrapper")
        assert [call.arguments[0].name for call in found] == [f"model.layers.{name}" for name in names]
        assert all(call.result == call.arguments[0] for call in found)
        assert made.calls.index(found[-1]) < made.calls.index(called(made, "fully_shard")[0])


REFUSED = [
    (f"{PIPELINE}, pipeline_parallel_zero_bubble: zbh1", QWEN, "", ["zero_bubble zbh1 must be none", "Use none, or"]),
    ("context_parallel: 2, context_parallel_order: zigzag", QWEN, "", ["zigzag must be contiguous", "--engine native"]),
    ("context_parallel: 2, context_parallel_async: true", QWEN, "", ["async true must be false", "there is no ring"]),
    ("disable_gradient_division: false", QWEN, "", ["division false must be true", "Write true"]),
    ("", f"{QWEN}, tie_word_embeddings: true", "", ["tie_word_embeddings true must be false", "two modules"]),
    ("", QWEN.replace("compute_dtype: float32", "compute_dtype: float64"), "", ["must not be float64", "Use bfloat16"]),
    (PIPELINE, DEEPSEEK, "", ["num_nextn_predict_layers 1 must be 0 with pipeline_parallel 2", "Use 0"]),
    ("tensor_parallel: 4", QWEN, "", ["tensor_parallel 4 must divide the 2 heads of", "k_proj", "Use 2, or"]),
    (
        "context_parallel: 4, context_parallel_method: ulysses",
        QWEN.replace("num_key_value_heads: 2", "num_key_value_heads: 4"),
        "swap: {enable: true, layer_swap: [{layers: [0]}]}",
        ["swap.enable must be left out", "not mapped"],
    ),
    ("", QWEN, "recompute: {mode: select, select_module: {attention: [0]}}", ["matches none", "self_attn.q_proj"]),
    (
        "context_parallel: 2, context_parallel_method: ulysses, context_parallel_async: true",
        QWEN,
        "recompute: {mode: select, select_module: {'self_attn.core_attention': [0]}}",
        ["must not name self_attn.core_attention alone", "Name self_attn, write"],
    ),
    ("dense_fsdp_shard_size: 2", QWEN, "", ["dense_fsdp_shard_size must be left out"]),
]


@pytest.mark.filterwarnings("ignore::parallel_config.ConfigWarning")
@pytest.mark.parametrize(("parallelism", "model", "more", "said"), REFUSED)
def test_what_hyperparallel_cannot_do_is_refused(parallelism: str, model: str, more: str, said: list[str]) -> None:
    config = config_of(parallelism, model, more)
    with pytest.raises(UserError) as caught:
        check(config, 4)
    assert len(caught.value.problems) == 1
    for fragment in said:
        assert fragment in caught.value.problems[0]
    assert caught.value.problems[0].startswith("run.yaml:")


def test_fewer_micro_batches_than_an_interleaved_pipeline_needs() -> None:
    sizes = "pipeline_parallel: 4, pipeline_parallel_interleave_num: 1, pipeline_parallel_layers_per_stage: auto"
    check(config_of(sizes, batch=2), 4)
    model = QWEN.replace("num_hidden_layers: 4", "num_hidden_layers: 8")
    twice = sizes.replace("interleave_num: 1", "interleave_num: 2")
    check(config_of(twice, model, batch=3), 4)
    with pytest.raises(UserError, match=r"must give 3 micro-batches or more.*gives 2.*Use 3 or more"):
        check(config_of(twice, model, batch=2), 4)


def test_one_rank_has_nothing_to_split() -> None:
    with pytest.raises(UserError, match="there is 1: use --world-size 2"):
        check(config_of(), 1)


@pytest.mark.parametrize(
    ("option", "variable", "section", "engine", "where"),
    [
        (None, None, "", "native", "extensions.engine native"),
        (None, None, "hyperparallel", "hyperparallel", "extensions.engine hyperparallel"),
        (None, "native", "hyperparallel", "native", f"{VARIABLE}=native"),
        ("hyperparallel", "native", "native", "hyperparallel", "--engine hyperparallel"),
        (None, "", "hyperparallel", "hyperparallel", "extensions.engine hyperparallel"),
    ],
)
@pytest.mark.filterwarnings("ignore::parallel_config.ConfigWarning")
def test_the_command_line_chooses_before_the_environment_before_the_file(
    option: str | None, variable: str | None, section: str, engine: str, where: str
) -> None:
    config = loads(f"extensions: {{engine: {section}}}" if section else "training: {steps: 1}")
    environment = {} if variable is None else {VARIABLE: variable}
    found = choose(option, environment, config)
    assert (found.engine, found.where) == (engine, where)


def test_an_engine_that_does_not_exist_is_refused() -> None:
    config = loads("training: {steps: 1}")
    with pytest.raises(UserError, match="--engine hyper must be native or hyperparallel"):
        choose("hyper", {VARIABLE: "native"}, config)
    with pytest.raises(UserError, match=f"{VARIABLE}=natve .*Did you mean native"):
        choose(None, {VARIABLE: "natve"}, config)


def test_plan_shows_the_calls_without_data(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(next(path for path in SCENARIOS if path.stem == "4.4-2-uneven-stages"))
    assert main(["plan", path, "--world-size", "8", "--engine", "hyperparallel", "--rank", "5"]) == 0
    shown = capsys.readouterr().out
    first, second = shown.splitlines()[:2]
    assert first == "# ranks: 8 = pp 2 (2 chunks a rank) x dp_replicate 1 x dp_shard 1 x tp 4"
    assert second == "# Ranks 4-7 call HyperParallel 1.0 like this; others: --rank 0."
    assert "# virtual stages 1, 3" in shown
    assert all(len(line) <= 120 for line in shown.splitlines())
    compile(shown, "calls", "exec")
    assert main(["plan", path, "--world-size", "8", "--engine", "hyperparallel", "--rank", "8"]) == 2
    assert "--rank 8 must be 0 … 7" in capsys.readouterr().err


def test_training_with_it_on_a_cpu_is_refused_before_anything_else(
    capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setenv(VARIABLE, "hyperparallel")
    monkeypatch.setattr("parallel_trainer.engines.choice.find_spec", lambda name: None)
    path = str(SCENARIOS[0])
    assert main(["run", path]) == 2
    said = capsys.readouterr().err
    assert f"{VARIABLE}=hyperparallel trains on NPUs alone" in said
    assert "git clone" in said
    assert "build.sh --multicore off --shmem off --custom-ops off" in said
    assert "--engine native trains here" in said
    monkeypatch.setattr("parallel_trainer.engines.choice.find_spec", lambda name: object())
    assert main(["run", path]) == 2
    assert "git clone" not in capsys.readouterr().err
    assert main(["verify", path, "--nproc", "2"]) == 2
    assert "verify trains with the native engine alone. Use --engine native" in capsys.readouterr().err


def test_on_npus_it_needs_the_library(monkeypatch) -> None:
    choice = Choice("hyperparallel", "--engine hyperparallel")
    monkeypatch.setattr("parallel_trainer.engines.choice.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"hyperparallel cannot train yet:\s+- hyper_parallel has to be installed"):
        check_trains(choice, "ascend")
    monkeypatch.setattr("parallel_trainer.engines.choice.find_spec", lambda name: object())
    check_trains(choice, "ascend")


def test_the_reference_s_start_up_line_passes_the_engine_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("parallel_trainer.cli.run.run", lambda args: asked.append((args.device, args.engine)) or 0)
    line = ["--config", "run.yaml", "--device_target", "Ascend"]
    assert run_mindformer.main([*line, "--engine", "hyperparallel"]) == 0
    assert run_mindformer.main(line) == 0
    assert asked == [("ascend", "hyperparallel"), ("ascend", None)]


def test_a_run_is_the_chosen_engine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("trainer.Trainer", "engines.hyperparallel.trainer.HyperParallelTrainer"):
        monkeypatch.setattr(f"parallel_trainer.{name}", lambda *given, name=name: (name.rpartition(".")[2], *given))
    assert run._trainer("job", "ranks", "hyperparallel") == ("HyperParallelTrainer", "job", "ranks")
    assert run._trainer("job", "ranks", "native") == ("Trainer", "job", "ranks")


HELD_OUT = """{type: BlendedMegatronDatasetDataLoader, datasets_type: GPTDataset,
    config: {seq_length: 16, valid_data_path: [corpus/valid_text_document]}}"""


@pytest.mark.filterwarnings("ignore::parallel_config.ConfigWarning")
def test_what_a_run_does_not_do_yet_is_refused_with_a_way_out() -> None:
    sections = {
        "checkpoint: {enable_save: true, save_path: out}": ["checkpoint.enable_save", "Write false"],
        "checkpoint: {enable_save: false, load_path: out}": ["checkpoint.load_path", "Remove it"],
        f"eval_dataset: {{interval: 2, dataloader: {HELD_OUT}}}": ["eval_dataset must", "Remove the section"],
    }
    for section, said in sections.items():
        (problem,) = map(str, unserved(config_of(more=section)))
        assert all(part in problem for part in [*said, "--engine native"]), problem
    (problem,) = map(str, unserved(config_of("cpu_offload: true")))
    assert "parallelism.cpu_offload must be left out of a run" in problem
    assert list(unserved(config_of())) == []


def test_npus_need_ranks_that_msrun_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_mindformer.main(["--config", "x.yaml", "--device_target", "Ascend"]) == 2
    assert "ranks on NPUs are started by MindSpore's msrun: msrun --worker_num=N" in capsys.readouterr().err
    assert run_mindformer.main(["--config", "x.yaml", "--device_target", "GPU"]) == 2
    assert "--device_target GPU is not one of CPU, Ascend" in capsys.readouterr().err
