"""The parity matrix: which plans are trained and what each must equal."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from attrs import evolve, field, frozen

WORLDS = (1, 2, 4, 8)
STEPS = 2
SCENARIO_STEPS = 3
"""Their learning rates begin at 0."""
GLOBAL_BATCH = 24
SEQ_LENGTH = 32
VOCAB_SIZE = 61
EOD, PAD = 0, 1

# Odd sizes on purpose: most weights do not divide by 4 or 8, the q/k norms have fewer elements than 8 ranks.
_CONFIG = """
parallelism:
  data_parallel_shard: {dp_shard}
  reshard_after_forward_policy: "{reshard}"
  disable_gradient_division: {sum_gradients}
  context_parallel: {cp}
  context_parallel_method: {method}
  context_parallel_async: {asynchronous}
  context_parallel_order: {order}
  ulysses_degree_in_cp: {ulysses}
  tensor_parallel: {tp}
  enable_loss_parallel: {loss_parallel}
  pipeline_parallel: {pp}
  pipeline_parallel_interleave_num: {chunks}
  pipeline_parallel_layers_per_stage: {layout}
  pipeline_parallel_overlap_p2p: {overlap}
  expert_parallel: {ep}
  moe_token_dispatcher_type: {dispatcher}
  npu_nums_per_device: {node}
  pipeline_parallel_overlap_b_f: {paired}
  pipeline_parallel_zero_bubble: {zero_bubble}
training:
  steps: {steps}
  global_batch_size: {global_batch}
  local_batch_size: {local_batch}
  max_norm: 0.5
  seed: 7
model:
{architecture}  vocab_size: {vocab}
  seq_length: {seq}
  max_position_embeddings: {seq}
  hidden_size: 20
  intermediate_size: 24
  num_hidden_layers: {layers}
  num_attention_heads: 8
  initializer_range: 0.1
  tie_word_embeddings: {tied}
  params_dtype: {dtype}
  compute_dtype: {dtype}
  use_attn_mask_compression: {causal}
optimizer:
  type: AdamW
  weight_decay: 0.1
lr_scheduler:
  type: LinearWithWarmUpLR
  learning_rate: 1.0e-2
  warmup_steps: 0
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [{samples}, 0, 0]
    column_names: [input_ids, labels, loss_mask, position_ids{mask_column}]
    config:
      data_path: ["{corpus}"]
      split: "1, 0, 0"
      seq_length: {seq}
      eod: {eod}
      pad: {pad}
      eod_mask_loss: true
      reset_position_ids: true
      create_attention_mask: false
      create_compressed_eod_mask: {compressed}
"""

_QWEN3 = """
  model_type: qwen3
  architectures: Qwen3ForCausalLM
  num_key_value_heads: {kv_heads}
  head_dim: 6
  attention_bias: {bias}
"""

_QWEN3_MOE = """
  model_type: qwen3_moe
  architectures: Qwen3MoeForCausalLM
  num_key_value_heads: {kv_heads}
  head_dim: 6
  num_experts: {experts}
  num_experts_per_tok: {top_k}
  moe_intermediate_size: 10
  norm_topk_prob: true
  moe_aux_loss_coeff: 0.1
"""

# Four groups of experts, of which a token may choose from two, or from one if it takes one expert.
_DEEPSEEK_V3 = """
  model_type: deepseek_v3
  architectures: DeepseekV3ForCausalLM
  num_key_value_heads: 8
  q_lora_rank: 10
  kv_lora_rank: 6
  qk_nope_head_dim: 6
  qk_rope_head_dim: 4
  v_head_dim: 5
  n_routed_experts: {experts}
  num_experts_per_tok: {top_k}
  n_shared_experts: 1
  moe_intermediate_size: 10
  first_k_dense_replace: 1
  n_group: 4
  topk_group: {groups}
  norm_topk_prob: true
  routed_scaling_factor: 2.5
  moe_router_enable_expert_bias: true
  moe_router_bias_update_rate: 0.02
  moe_router_load_balancing_type: sub_seq_aux_loss
  moe_aux_loss_coeff: 0.1
  num_nextn_predict_layers: {mtp}
  mtp_loss_scaling_factor: 0.3
"""

ARCHITECTURES = {"qwen3": _QWEN3, "qwen3_moe": _QWEN3_MOE, "deepseek_v3": _DEEPSEEK_V3}

TEXTS = ("plain", "packed", "long", "padded")
"""What samples look like. plain and packed: documents of 1 to 60 tokens, seen as one or kept apart in attention. long:
a sample is a piece of one document. padded: half of the tokens and more are padding, kept apart like a document."""


@frozen
class Model:
    """What is trained, whatever the plan: a run on one rank that many plans must equal."""

    dtype: str = "float64"
    tied: bool = False
    kv_heads: int = 2
    text: str = "plain"
    bias: bool = False
    layers: int = 2
    batch: int = GLOBAL_BATCH
    architecture: str = "qwen3"
    experts: int = 8
    top_k: int = 2
    mtp: int = 0

    @property
    def name(self) -> str:
        parts = [] if self.architecture == "qwen3" else [self.architecture, f"top{self.top_k}of{self.experts}"]
        parts += ["mtp"] if self.mtp else []
        parts += [self.dtype, "tied" if self.tied else "untied", f"kv{self.kv_heads}", self.text]
        parts += ["bias"] if self.bias else []
        parts += [f"{self.layers}layers-batch{self.batch}"] if (self.layers, self.batch) != (2, GLOBAL_BATCH) else []
        return "-".join(parts)

    @property
    def section(self) -> str:
        """The lines of the model section that depend on the architecture."""
        return (
            ARCHITECTURES[self.architecture]
            .lstrip("\n")
            .format(
                kv_heads=self.kv_heads,
                bias=_flag(self.bias),
                experts=self.experts,
                top_k=self.top_k,
                groups=min(self.top_k, 2),
                mtp=self.mtp,
            )
        )


@frozen
class Case:
    """One plan, trained for `STEPS` steps and compared with one rank."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    method: str = "colossal"
    ulysses: int | None = None
    asynchronous: bool = False
    order: str = "contiguous"
    loss_parallel: bool = False
    pp: int = 1
    chunks: int = 1
    layout: str = "auto"
    overlap: bool = False
    ep: int = 1
    node: int | None = None
    paired: bool = False
    zero_bubble: str = "none"
    reduction: str = "sum"
    reshard: str = "default"
    accumulation: int = 1
    model: Model = field(factory=Model)

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dimensions(self) -> str:
        """Which kind of plan this is, for the tables."""
        context = [f"{self.method} context parallel"] if self.cp > 1 else []
        kind = "zero-bubble" if self.zero_bubble != "none" else "interleaved" if self.chunks > 1 else ""
        pipeline = [f"{kind} pipeline".strip()] if self.pp > 1 else []
        experts = ["expert parallel"] if self.ep > 1 else ["experts"] if self.model.architecture != "qwen3" else []
        return " x ".join([*pipeline, *experts, *(["tensor parallel"] if self.tp > 1 else []), *context, "FSDP, HSDP"])

    @property
    def degrees(self) -> str:
        """The plan's degrees as the tables show them."""
        names = ("pp", "chunks", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        shown = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1]
        return " x ".join(shown) or "one rank"

    @property
    def name(self) -> str:
        parts = [f"{self.dp_replicate}x{self.dp_shard}x{self.cp}x{self.tp}"]
        if self.pp > 1:
            parts.insert(0, f"pp{self.pp}x{self.chunks}")
            parts += [self.zero_bubble] if self.zero_bubble != "none" else []
            parts += [] if self.layout == "auto" else ["uneven"]
            parts += [*(["overlap"] if self.overlap else []), *(["paired"] if self.paired else [])]
        parts += [f"ep{self.ep}"] if self.ep > 1 else []
        parts += [f"nodes-of-{self.node}"] if self.node else []
        parts += ["lossparallel"] if self.loss_parallel else []
        if self.cp > 1:
            parts += [self.method + (str(self.ulysses) if self.method == "hybrid" else ""), self.order]
            parts += ["async"] if self.asynchronous else []
        return "-".join([*parts, self.reduction, self.reshard, f"acc{self.accumulation}", self.model.name])

    def yaml(self, corpora: Mapping[str, str]) -> str:
        """The file, given the prefix of each text's corpus."""
        text = self.model.text
        compressed = text != "plain"
        return _CONFIG.format(
            dp_shard=self.dp_shard,
            reshard=self.reshard,
            sum_gradients=_flag(self.reduction == "sum"),
            cp=self.cp,
            method=self.method,
            asynchronous=_flag(self.asynchronous),
            order=self.order,
            ulysses="null" if self.ulysses is None else self.ulysses,
            steps=STEPS,
            global_batch=self.model.batch,
            layers=self.model.layers,
            pp=self.pp,
            chunks=self.chunks,
            layout=self.layout if self.pp > 1 else "null",
            overlap=_flag(self.overlap),
            ep=self.ep,
            dispatcher="alltoall_deredundancy" if self.node else "alltoall",
            node=self.node or 8,
            architecture=self.model.section,
            paired=_flag(self.paired),
            zero_bubble=self.zero_bubble,
            tp=self.tp,
            loss_parallel=_flag(self.loss_parallel),
            local_batch=self.model.batch // (self.dp_replicate * self.dp_shard * self.accumulation),
            vocab=VOCAB_SIZE,
            seq=SEQ_LENGTH,
            tied=_flag(self.model.tied),
            dtype=self.model.dtype,
            causal=_flag(not compressed),
            samples=STEPS * self.model.batch,
            mask_column=", actual_seq_len" if compressed else "",
            corpus=corpora[text],
            eod=EOD,
            pad=PAD if text == "padded" else -1,
            compressed=_flag(compressed),
        )


def corpora() -> dict[str, str]:
    """By text the prefix of its corpus, from the folder that ranks are started with."""
    found: dict[str, str] = json.loads(Path(sys.argv[1], "corpora.json").read_text(encoding="utf-8"))
    return found


def _flag(value: bool) -> str:
    return str(value).lower()


def _splits(ranks: int) -> list[tuple[int, int]]:
    return [(ranks // shard, shard) for shard in range(1, ranks + 1) if ranks % shard == 0]


class Draw:
    """Values in a random order that is the same in every run, each equally often: choices that must not go in step."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._decks: dict[Any, list[Any]] = {}

    def __call__(self, name: object, *values: Any) -> Any:
        """The next value of the deck `name`."""
        if not self._decks.get(name):
            self._decks[name] = self._random.sample(values, len(values))
        return self._decks[name].pop()


def _data_parallel() -> Iterator[Case]:
    """Every split with every reshard policy, one micro-batch and several; reductions and tied heads are drawn."""
    draw = Draw(0)
    for split in itertools.chain.from_iterable(map(_splits, WORLDS)):
        # Eight ranks share two cores: they run one number of micro-batches, or the other.
        numbers = (1, 3) if math.prod(split) < 8 else (draw("micro-batches", 1, 3),)
        for reshard, accumulation in itertools.product(("always", "never", "default"), numbers):
            yield Case(
                *split,
                reduction=draw((reshard, "reduction"), "sum", "mean"),
                reshard=reshard,
                accumulation=accumulation,
                model=Model(tied=draw((reshard, "tied"), False, False, True)),
            )
        if math.prod(split) < 8:  # rounding is the same on eight ranks as on four, and they share two cores
            yield Case(*split, accumulation=draw("accumulation", 1, 3), model=Model(dtype="float32"))


def _context_parallel() -> Iterator[Case]:
    """Every method, asynchronous or not, on every split of the ranks; the other choices are drawn."""
    draw = Draw(1)
    for world in WORLDS:
        for cp in (size for size in (2, 4, 8) if world % size == 0):
            replicas = {(world // cp, 1), (1, world // cp)}
            hybrids = [("hybrid", inner) for inner in (2, 4) if inner < cp]
            methods = [("colossal", None), ("ulysses", None), *hybrids]
            for split, (method, inner), asynchronous in itertools.product(sorted(replicas), methods, (False, True)):
                case = Case(*split, cp, method=method, ulysses=inner, asynchronous=asynchronous)
                # Eight ranks share two cores: they run every second of these once.
                runs = 2 if world < 8 else int(cp == 8 or draw((cp, "split"), True, False))
                for _ in range(runs):
                    text = draw((world, asynchronous, "text"), *TEXTS)
                    order = draw((world, text, "order"), "contiguous", "zigzag")
                    yield evolve(
                        case,
                        order=order,
                        reduction=draw((world, order, "reduction"), "sum", "mean"),
                        reshard=draw("reshard", "default", "never"),
                        accumulation=draw("accumulation", 1, 3),
                        model=Model(
                            text=text,
                            kv_heads=draw("kv_heads", 2, 4, 8),
                            tied=draw("tied", False, False, True),
                        ),
                    )
                if split[0] == 1 and world < 8:
                    yield evolve(case, model=Model(dtype="float32", text="packed"))


def _tensor_parallel() -> Iterator[Case]:
    """Every degree and both kinds of logits on every split of the ranks, then crossed with context parallelism."""
    draw = Draw(2)
    for world in WORLDS:
        for tp in (size for size in (2, 4, 8) if world % size == 0):
            for split, loss_parallel in itertools.product(_splits(world // tp), (False, True)):
                # Two key/value heads and eight ranks: four hold the same one. Eight of eight: every number of heads.
                every = [((number + loss_parallel) % 2 == 1, heads) for number, heads in enumerate((2, 4, 8))]
                drawn = [
                    (draw((tp, "tied"), False, True), draw((tp, loss_parallel, "kv_heads"), 2, 4, 8)) for _ in range(3)
                ]
                for tied, kv_heads in every if tp == 8 else drawn[: 1 if world == 8 else 2]:
                    yield Case(
                        *split,
                        tp=tp,
                        loss_parallel=loss_parallel,
                        reduction=draw("reduction", "sum", "mean"),
                        reshard=draw("reshard", "default", "never"),
                        accumulation=draw("accumulation", 1, 3),
                        model=Model(tied=tied, kv_heads=kv_heads, bias=draw("bias", False, False, True)),
                    )
                if split[0] == 1 and world < 8:
                    yield Case(*split, tp=tp, loss_parallel=loss_parallel, model=Model(dtype="float32"))
    for cp, tp, split in ((2, 2, (1, 1)), (2, 2, (1, 2)), (2, 2, (2, 1)), (4, 2, (1, 1)), (2, 4, (1, 1))):
        hybrid = [("hybrid", 2)] if cp == 4 else []
        for (method, inner), asynchronous in itertools.product(
            [("colossal", None), ("ulysses", None), *hybrid], (False, True)
        ):
            yield Case(
                *split,
                cp,
                tp,
                method,
                inner,
                asynchronous,
                order=draw("order", "contiguous", "zigzag"),
                loss_parallel=draw("loss_parallel", False, True),
                reduction=draw("crossed reduction", "sum", "mean"),
                reshard=draw("crossed reshard", "default", "never"),
                accumulation=draw("crossed accumulation", 1, 3),
                model=Model(
                    text=draw("text", *TEXTS),
                    kv_heads=draw("crossed kv_heads", 2, 4, 8),
                    tied=draw("tied", False, True),
                ),
            )


def _uneven(ranks: Sequence[int]) -> tuple[str, int]:
    """Layer ranges for virtual stages on these ranks, one layer and two in turns; how many layers in all."""
    sizes = [1 + stage % 2 for stage in range(len(ranks))]
    ends = list(itertools.accumulate(sizes))
    items: dict[int, list[str]] = {rank: [] for rank in sorted(ranks)}
    for rank, end, size in zip(ranks, ends, sizes, strict=True):
        items[rank].append(f"{end - size}-{end - 1}")
    return str([", ".join(pieces) for pieces in items.values()]), ends[-1]


class Meetings:
    """Chooses values such that every value of one name meets every value of every other name, after few calls."""

    def __init__(self) -> None:
        self._met: Counter[tuple[object, ...]] = Counter()

    def __call__(self, fixed: Mapping[str, object], **options: Sequence[object]) -> dict[str, Any]:
        """One value for each of `options`: those that make most pairs for the first time, with the fixed ones too."""
        candidates = [dict(zip(options, chosen, strict=True)) for chosen in itertools.product(*options.values())]

        def merit(chosen: dict[str, object]) -> tuple[int, int]:
            met = [self._met[pair] for pair in _pairs({**fixed, **chosen})]
            return met.count(0), -sum(met)

        best = max(candidates, key=merit)
        self._met.update(_pairs({**fixed, **best}))
        return best


def _pairs(values: Mapping[str, object]) -> Iterator[tuple[object, ...]]:
    return itertools.combinations(values.items(), 2)


class Pipelines:
    """Pipelines that differ in what is not asked for: layouts, transfers, resharding, tied heads meet each other."""

    def __init__(self) -> None:
        self._kinds: dict[object, Meetings] = {}
        self._draw = Draw(3)

    def __call__(self, pp: int, chunks: int, micro_batches: int, batch: int, **fields: Any) -> Case:
        """A pipeline of a global batch; `fields` are the case's others."""
        zero_bubble, paired = fields.get("zero_bubble", "none"), fields.get("paired")
        meetings = self._kinds.setdefault((pp, zero_bubble != "none", paired), Meetings())
        beside = tuple(sorted((name, value) for name, value in fields.items() if name not in ("zero_bubble", "paired")))
        chosen = meetings(
            {"chunks": chunks, "micro-batches": micro_batches, "beside": beside},
            uneven=(False, True),
            overlap=(False, True),
            reshard=("default", "always"),
            reduction=("sum", "mean"),
            tied=(False, True),
        )
        ranks = (*range(pp), *reversed(range(pp))) if zero_bubble == "zbv" else (*range(pp),) * chunks
        layout, layers = _uneven(ranks) if chosen.pop("uneven") else ("auto", pp * chunks)
        model = Model(
            layers=layers,
            batch=batch,
            text=self._draw("text", *TEXTS) if "cp" in fields else "plain",
            tied=chosen.pop("tied"),
            bias="tp" in fields,
        )
        return Case(pp=pp, chunks=chunks, accumulation=micro_batches, layout=layout, model=model, **chosen, **fields)


MICRO_BATCHES = {2: (1, 2, 5), 4: (1, 3, 4, 9)}
"""Fewer than the stages, as many, and a number that they do not divide."""
BATCH = {2: 10, 4: 36}
BESIDE_PIPELINE = (
    {"dp_shard": 2},
    {"dp_replicate": 2},
    {"cp": 2, "method": "ulysses"},
    {"cp": 2, "method": "colossal", "asynchronous": True, "order": "zigzag"},
    {"tp": 2, "loss_parallel": True},
    {"tp": 2},
)
"""What a pipeline of two stages is crossed with on four ranks."""
PAGE_LAYERS = "['0-1, 4-8', '2-3, 9']"


def _pipeline() -> Iterator[Case]:
    """Every number of stages and chunks with few and many micro-batches, then crossed with the other dimensions."""
    pipeline = Pipelines()
    for pp, batch in BATCH.items():
        for chunks, micro_batches in itertools.product((1, 2, 3), MICRO_BATCHES[pp]):
            yield pipeline(pp, chunks, micro_batches, batch)
            if micro_batches != 1:
                yield pipeline(pp, chunks, micro_batches, batch, paired=True)
        for micro_batches in MICRO_BATCHES[pp]:
            yield pipeline(pp, 1, micro_batches, batch, zero_bubble="zbh1")
            yield pipeline(pp, 2, micro_batches, batch, zero_bubble="zbv")
        yield Case(pp=pp, accumulation=4, model=Model(dtype="float32", layers=4, batch=36))
    for number, degrees in enumerate(BESIDE_PIPELINE):
        for chunks, micro_batches in itertools.product((1, 2, 3), MICRO_BATCHES[2]):
            yield pipeline(2, chunks, micro_batches, 20, **degrees)
        yield pipeline(2, 1 + number % 3, 2 if number < 3 else 5, 20, paired=True, **degrees)
        yield pipeline(2, 1, 5, 20, zero_bubble="zbh1", **degrees)
        yield pipeline(2, 2, 5, 20, zero_bubble="zbv", **degrees)
    # Eight ranks share two cores: each of these crosses something that four ranks cannot.
    yield pipeline(8, 1, 1, 56)
    yield pipeline(8, 2, 7, 56)
    yield pipeline(8, 3, 8, 56)
    yield pipeline(8, 1, 17, 17)
    yield pipeline(2, 1, 5, 20, dp_shard=2, tp=2)
    yield pipeline(2, 2, 1, 20, dp_replicate=2, cp=2)
    yield pipeline(2, 3, 5, 20, cp=2, tp=2, loss_parallel=True)
    yield pipeline(2, 2, 2, 24, dp_shard=4)
    yield pipeline(4, 1, 9, 36, dp_shard=2, zero_bubble="zbh1")
    yield pipeline(4, 2, 3, 12, tp=2, zero_bubble="zbv")
    # The two examples of the specification (section 4.4).
    for layers, layout in ((8, "auto"), (10, PAGE_LAYERS)):
        yield Case(
            pp=2, chunks=2, tp=4, layout=layout, overlap=True, accumulation=4, model=Model(layers=layers, batch=8)
        )
    for chunks, micro_batches in itertools.product((1, 2, 3), (1, 7, 8, 17)):
        if (chunks, micro_batches) not in ((1, 1), (2, 7), (3, 8), (1, 17)):
            yield pipeline(8, chunks, micro_batches, 17 if micro_batches == 17 else 56)


_EXPERT_MODELS = (
    Model(architecture="qwen3_moe", experts=8, top_k=2, kv_heads=4),
    Model(architecture="qwen3_moe", experts=16, top_k=4, text="padded"),
    Model(architecture="deepseek_v3", experts=8, top_k=2),
    Model(architecture="deepseek_v3", experts=16, top_k=4, text="padded", tied=True),
    Model(architecture="deepseek_v3", experts=8, top_k=1, text="packed", mtp=1),
    Model(architecture="deepseek_v3", experts=16, top_k=2, text="plain", mtp=1, tied=True),
)
"""Where text is padded, half of all tokens are alike and go to the same few experts."""

# The degrees that share the ranks of experts, and how many of them form a group of experts.
_EXPERT_SPLITS: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
    ({"dp_shard": 2}, (1, 2)),
    ({"dp_replicate": 2}, (1,)),
    ({"cp": 2}, (2,)),
    ({"tp": 2}, (1, 2)),
    ({"pp": 2}, (1,)),
    ({"dp_shard": 4}, (2, 4)),
    ({"dp_replicate": 2, "dp_shard": 2}, (2,)),
    ({"cp": 4}, (4,)),
    ({"tp": 4}, (2, 4)),
    ({"dp_shard": 2, "tp": 2}, (2, 4)),
    ({"cp": 2, "tp": 2}, (1, 2, 4)),
    ({"dp_shard": 2, "cp": 2}, (4,)),
    ({"pp": 2, "dp_shard": 2}, (2,)),
    ({"pp": 2, "tp": 2}, (2,)),
    ({"pp": 2, "cp": 2}, (2,)),
    ({"dp_shard": 2, "tp": 4}, (2, 8)),  # the specification's first example, and all ranks
    ({"dp_shard": 4, "tp": 2}, (4,)),  # its second, on half as many ranks
    ({"dp_shard": 8}, (8,)),
    ({"tp": 8}, (4, 8)),
    ({"cp": 8}, (8,)),
    ({"dp_shard": 2, "cp": 2, "tp": 2}, (4, 8)),
    ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, (4,)),
    ({"pp": 2, "dp_shard": 2, "tp": 2}, (4,)),
    ({"pp": 2, "cp": 2, "tp": 2}, (2,)),
)


def _expert_parallel() -> Iterator[Case]:
    """Experts over every combination of the other dimensions, with the plain and the redundancy-free dispatcher."""
    draw = Draw(4)
    for degrees, groups in _EXPERT_SPLITS:
        world = math.prod(degrees.values())
        for ep in groups:
            nodes = (None, *(node for node in (2, 4) if node <= ep))
            # Eight ranks share two cores: they run one of these.
            for node in nodes if world < 8 else (draw((ep, "node"), *nodes),):
                model = draw((world, "model"), *_EXPERT_MODELS)
                if "pp" in degrees:
                    model = evolve(model, layers=4)
                yield Case(
                    **degrees,
                    ep=ep,
                    node=node,
                    chunks=2 if "pp" in degrees else 1,
                    accumulation=3 if "pp" in degrees else draw((world, "accumulation"), 1, 3),
                    method=draw("method", "colossal", "ulysses") if "cp" in degrees else "colossal",
                    asynchronous="cp" in degrees and draw("asynchronous", False, True),
                    order=draw("order", "contiguous", "zigzag") if "cp" in degrees else "contiguous",
                    loss_parallel="tp" in degrees and draw("loss_parallel", False, True),
                    paired="pp" in degrees and not node and draw("paired", False, True),
                    reduction=draw("reduction", "sum", "mean"),
                    reshard=draw("reshard", "default", "never"),
                    model=model,
                )
    for zero_bubble, chunks in (("zbh1", 1), ("zbv", 2)):
        yield Case(
            pp=2,
            dp_shard=2,
            ep=2,
            chunks=chunks,
            accumulation=3,
            zero_bubble=zero_bubble,
            model=evolve(_EXPERT_MODELS[-1], layers=4),
        )
    yield Case(dp_shard=2, ep=2, model=evolve(_EXPERT_MODELS[0], dtype="float32"))


CASES = tuple(
    dict.fromkeys((*_data_parallel(), *_context_parallel(), *_tensor_parallel(), *_pipeline(), *_expert_parallel()))
)
BASELINES = tuple({case.model: None for case in CASES})
SCENARIOS = sorted((Path(__file__).parents[1] / "docs" / "scenarios" / "specification").glob("*.yaml"))
"""The specification's, for eight ranks."""
