"""How many ranks share what: the degrees of `parallel_config`, and which optimizer states are sharded.

Sources, all in the mindformers 2.1.0 wheel: tools/check_rules.py (`_check_parallel`: data_parallel · model_parallel ·
context_parallel · pipeline_stage is the number of devices), tools/register/template.py (defaults),
trainer/base_trainer.py (`_check_global_batch_size_for_auto_parallel`: what each parallel_mode does with the degrees),
parallel_core/transformer_config_utils.py (`get_cp_comm_type`).
"""

from __future__ import annotations

from attrs import frozen

from parallel_config.migrate.draft import Draft, Kind
from parallel_config.rules.fitting import divisors

_SECTION = "parallel_config"
_DEGREES = ("data_parallel", "model_parallel", "context_parallel", "pipeline_stage", "expert_parallel")
_MODES = {
    0: "data",
    1: "semi",
    2: "auto",
    3: "hybrid",
    "DATA_PARALLEL": "data",
    "SEMI_AUTO_PARALLEL": "semi",
    "AUTO_PARALLEL": "auto",
    "HYBRID_PARALLEL": "hybrid",
    "STAND_ALONE": "alone",
}
_METHODS = {
    "colossalai_cp": "colossal",
    "ulysses_cp": "ulysses",
    "hybrid_cp": "hybrid",
    "hybird_cp": "hybrid",
}

_MOST_RANKS = 2**31 - 1


@frozen
class Degrees:
    """What the old file's degrees come to. `split` says whether it splits models at all."""

    dp: int = 1
    mp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    split: bool = False

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp * self.mp * self.cp * self.pp


def degrees(draft: Draft, world_size: int | None) -> Degrees:
    """Carry the degrees. world_size: what the user asks for, which must be what the file fixes, if it fixes it."""
    mode = _mode(draft)
    if mode == "alone":
        found = Degrees()
        _no_effect(draft, "use_parallel is not true, so MindFormers trains on one device whatever degrees say")
    elif mode == "data":
        found = _data_parallel(draft, world_size)
    else:
        found = _degrees(draft)
    if world_size not in (None, found.world_size):
        draft.problems.append(
            draft.old.problem(
                _SECTION,
                None,
                f"fixes {found.world_size} = data_parallel {found.dp} · model_parallel {found.mp} · context_parallel"
                f" {found.cp} · pipeline_stage {found.pp} ranks, and --world-size is {world_size}",
                f"Leave --world-size out, or use {found.world_size}.",
                at_key=True,
            )
        )
    _tensor(draft, found)
    _context(draft, found)
    _expert(draft, found)
    _shard(draft, found)
    _data_strategy(draft, found)
    return found


def _mode(draft: Draft) -> str:
    written = draft.get("parallel.parallel_mode", 1)
    if not draft.switch("use_parallel", False):
        return "alone"
    mode = _MODES.get(written) if isinstance(written, (int, str)) and not isinstance(written, bool) else None
    if mode is None:
        draft.refuse(
            "parallel.parallel_mode", "must be 0, 1, 2 or 3", "Write 1, which takes parallel_config's degrees."
        )
        return "semi"
    if mode in ("auto", "hybrid"):
        draft.leave(
            "parallel.parallel_mode",
            "MindSpore chooses how operators are split; here parallel_config's degrees alone decide",
            Kind.COST,
        )
    return mode


def _degrees(draft: Draft) -> Degrees:
    dp, mp, cp, pp, ep = (draft.integer(f"{_SECTION}.{name}", 1) for name in _DEGREES)
    if dp * mp * cp * pp > _MOST_RANKS:
        draft.refuse(_SECTION, f"multiplies to more than {_MOST_RANKS} ranks", "Mend the old file first.")
        return Degrees(split=True)
    if dp * mp * cp % ep:
        draft.refuse(
            f"{_SECTION}.expert_parallel",
            f"must divide data_parallel {dp} · model_parallel {mp} · context_parallel {cp} = {dp * mp * cp}",
            "Mend the old file first: experts lie on the ranks of one pipeline stage.",
        )
        ep = 1
    return Degrees(dp, mp, cp, pp, ep, split=True)


def _data_parallel(draft: Draft, world_size: int | None) -> Degrees:
    if world_size is None:
        draft.refuse(
            "parallel.parallel_mode",
            "is data parallel, so the file does not say on how many ranks it runs",
            "Say --world-size N.",
        )
    _no_effect(draft, "parallel_mode is data parallel, which puts a whole model on each device")
    return Degrees(dp=world_size or 1)


def _no_effect(draft: Draft, why: str) -> None:
    for name in _DEGREES:
        draft.leave(f"{_SECTION}.{name}", why)


def _tensor(draft: Draft, found: Degrees) -> None:
    if not found.split:
        draft.leave(f"{_SECTION}.use_seq_parallel", "without tensor parallelism it has no effect")
        return
    draft.carry(f"{_SECTION}.model_parallel", "parallelism.tensor_parallel", found.mp)
    path = f"{_SECTION}.use_seq_parallel"
    written = draft.switch(path, False)
    if found.mp > 1 and found.cp == 1:
        how = "" if written else "always on here with tensor parallelism; the numbers are the same"
        draft.carry(path, "parallelism.sequence_parallel", True, how)
    else:
        draft.leave(path, f"sequence parallelism follows tensor_parallel {found.mp} here")


def _context(draft: Draft, found: Degrees) -> None:
    method, ulysses = f"{_SECTION}.context_parallel_algo", f"{_SECTION}.ulysses_degree_in_cp"
    if found.cp == 1:
        draft.carry(f"{_SECTION}.context_parallel", "parallelism.context_parallel", 1)
        for path in (method, ulysses):
            draft.leave(path, "context_parallel is 1")
        return
    draft.carry(f"{_SECTION}.context_parallel", "parallelism.context_parallel", found.cp)
    algorithm = draft.get(method, "colossalai_cp")
    name = _METHODS.get(algorithm) if isinstance(algorithm, str) else None
    if name is None:
        draft.refuse(method, f"must be {', '.join(_METHODS)}", "Mend the old file first.")
    draft.carry(method, "parallelism.context_parallel_method", name)
    if name == "hybrid":
        draft.carry(ulysses, "parallelism.ulysses_degree_in_cp", draft.integer(ulysses, 1))
    else:
        draft.leave(ulysses, f"context_parallel_algo is {algorithm}, and only hybrid_cp has two degrees")


def _expert(draft: Draft, found: Degrees) -> None:
    if found.split:
        draft.carry(f"{_SECTION}.expert_parallel", "parallelism.expert_parallel", found.ep)


def _shard(draft: Draft, found: Degrees) -> None:
    """The optimizer's sharding as FSDP (all of data_parallel) or HSDP (groups of optimizer_weight_shard_size)."""
    switch, group = (
        "parallel.enable_parallel_optimizer",
        "parallel.parallel_optimizer_config.optimizer_weight_shard_size",
    )
    sharded = found.dp > 1 and draft.switch(switch, False)
    sources: tuple[str, ...] = (f"{_SECTION}.data_parallel", switch) if found.split else (switch,)
    wanted, how = (found.dp, "enable_parallel_optimizer: all of data_parallel") if sharded else (1, "no sharding")
    if found.dp == 1:
        how = "data_parallel is 1"
    size = draft.integer(group, -1, minimum=-1) if draft.has(group) else -1
    if sharded and 0 < size < found.dp:
        wanted, how = size, f"optimizer_weight_shard_size {size} of data_parallel {found.dp}"
        sources = (*sources, group)
    elif draft.has(group):
        draft.leave(group, f"data_parallel {found.dp} is the most ranks that hold shards of one weight")
    if found.dp % wanted:
        draft.refuse(group, f"must divide data_parallel {found.dp}", "Mend the old file first.")
        return
    possible = [size for size in divisors(found.dp) if _fits(found, size)]
    shard = min((size for size in possible if size >= wanted), default=possible[-1])
    if shard != wanted:
        how += f"; {shard} because expert_parallel {found.ep} must divide data_parallel_shard · cp · tp here"
    draft.carry(sources, "parallelism.data_parallel_shard", shard, how)
    _gathering(draft, sharded=shard > 1 or found.cp > 1)


def _fits(found: Degrees, shard: int) -> bool:
    return shard * found.cp * found.mp % found.ep == 0


def _gathering(draft: Draft, *, sharded: bool) -> None:
    """Gathering weights again in the backward pass is what parallel_optimizer_comm_recompute switches."""
    path = "recompute_config.parallel_optimizer_comm_recompute"
    if not sharded:
        draft.leave(path, "no weights are sharded")
    elif draft.has(path):
        again = draft.switch(path, False)
        policy = "always" if again else "never"
        how = "weights are gathered again for the backward pass" if again else "weights stay gathered"
        draft.carry(path, "parallelism.reshard_after_forward_policy", policy, how)


def _data_strategy(draft: Draft, found: Degrees) -> None:
    """MindFormers refuses a dataset_strategy whose first number is not data_parallel."""
    path = "parallel.dataset_strategy"
    strategy = draft.get(path)
    first = strategy[0] if isinstance(strategy, list) and strategy else None
    if found.split and isinstance(first, list) and first and first[0] != found.dp:
        rule = f"begins with {first[0]} and must begin with data_parallel {found.dp}"
        draft.refuse(path, rule, "Mend the old file first: one of the two is wrong.")
