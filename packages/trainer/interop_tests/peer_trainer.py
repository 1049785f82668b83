"""Another trainer: transformers' models, PyTorch's AdamW, clipping and schedules, in float64, and nothing of ours.

It reads the same file as a plain dictionary. What transformers has not is written out here: the sequence auxiliary loss
and the biases of DeepSeek-V3 (arXiv:2412.19437), and the loss over the tokens that count. It has no micro-batches: a
step is one forward pass over the global batch. Shape suffixes: B sequences, T tokens of one, N experts, K of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import transformers
from peer_data import Rows, one_further, rows_of, samples_of
from run_record import Run
from transformers.modeling_layers import MtpModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

# Fields of a file's `model` section that say how it is trained, or are not called so in transformers.
NOT_IN_CONFIG = ("model_type", "architectures", "seq_length", "params_dtype", "compute_dtype", "rope_theta")


def build(section: Mapping[str, Any]) -> tuple[torch.nn.Module, MtpModel | None]:
    """The model of a file, and the module that predicts one token further if it has one."""
    sizes = {name: value for name, value in section.items() if name not in NOT_IN_CONFIG and "moe_router" not in name}
    heads = {"num_key_value_heads": section["num_attention_heads"]}  # as many, where a file does not say
    config = transformers.AutoConfig.for_model(
        section["model_type"],
        **heads | sizes,
        rope_parameters={"rope_type": "default", "rope_theta": section.get("rope_theta", 10_000.0)},
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    return model, MtpModel(model, 1).double() if section.get("num_nextn_predict_layers") else None


def named_weights(model: torch.nn.Module, further: MtpModel | None) -> dict[str, torch.Tensor]:
    """Weights and biases of routers, with the names of checkpoints."""

    def of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
        biases = {name: value for name, value in module.named_buffers() if name.endswith("e_score_correction_bias")}
        return dict(module.named_parameters()) | biases

    if further is None:
        return of(model)
    layer = f"model.layers.{model.config.num_hidden_layers}."
    module = {
        layer + name.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm."): value
        for name, value in of(further.layers[0]).items()
    }
    return of(model) | module


class Routers:
    """What the routers of a model see and choose while it runs, by the layer's name."""

    def __init__(self, model: torch.nn.Module, further: MtpModel | None) -> None:
        self.layers: dict[str, torch.nn.Module] = {}
        self.logits: dict[str, torch.Tensor] = {}
        self.chosen: dict[str, torch.Tensor] = {}
        layers = {f"model.layers.{number}": layer for number, layer in enumerate(model.model.layers)}
        if further is not None:
            layers[f"model.layers.{len(layers)}"] = further.layers[0].mtp_block
        for name, layer in layers.items():
            if hasattr(layer.mlp, "experts"):
                self._watch(name, layer.mlp)

    def _watch(self, name: str, experts: torch.nn.Module) -> None:
        def note(_: Any, __: Any, found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
            self.logits[name], _, self.chosen[name] = found

        self.layers[name] = experts
        experts.gate.register_forward_hook(note)

    def loads(self, experts: int) -> np.ndarray:
        """Tokens that each expert got, (layers, N)."""
        return np.stack([np.bincount(ids.flatten().numpy(), minlength=experts) for ids in self.chosen.values()])


def balance_of(s_GTN: torch.Tensor, top_k: int, *, so_far: bool = False) -> torch.Tensor:
    """Equations 17 to 20 without α, of affinities s of G groups of tokens: the mean over groups.

    In the paper a group is a sequence. With `so_far` choices are counted over this group and those before it.
    """
    groups, tokens, experts = s_GTN.shape
    among_top = torch.zeros_like(s_GTN).scatter(2, s_GTN.topk(top_k).indices, 1.0)
    f_GN = experts / (top_k * tokens) * among_top.sum(1)  # (18)
    if so_far:
        f_GN = f_GN.cumsum(0) / torch.arange(1, groups + 1)[:, None]
    p_GN = (s_GTN / s_GTN.sum(2, keepdim=True)).mean(1)  # (19), (20)
    return (f_GN * p_GN).sum(1).mean()  # (17)


def balance_loss(file: Mapping[str, Any], routers: Routers) -> torch.Tensor:
    """The auxiliary loss of all layers with its coefficient.

    Tokens are balanced over a sequence; over a micro-batch (Fedus et al., arXiv:2101.03961, equations 4 to 6); or over
    the micro-batches of a step so far (Qiu et al., arXiv:2501.11873, algorithm 1).
    """
    section, micro_batch = file["model"], file["training"]["local_batch_size"]
    kind = section["moe_router_load_balancing_type"]
    tokens = section["seq_length"] * {"seq_aux_loss": 1, "aux_loss": micro_batch, "global_aux_loss": micro_batch}[kind]
    total = torch.zeros(())
    for logits in routers.logits.values():
        logits_GTN = logits.reshape(-1, tokens, logits.shape[-1])
        scores = logits_GTN.sigmoid() if section["model_type"] == "deepseek_v3" else logits_GTN.softmax(-1)
        total = total + balance_of(scores, section["num_experts_per_tok"], so_far=kind == "global_aux_loss")
    return section["moe_aux_loss_coeff"] * total


def transformers_balance_loss(file: Mapping[str, Any], routers: Routers) -> torch.Tensor:
    """transformers' own, with the coefficient that makes it `aux_loss` for one micro-batch and one layer with experts.

    It joins the tokens of all layers before it multiplies the two means, and divides choices by tokens, not by
    tokens times K.
    """
    section = file["model"]
    loss = load_balancing_loss_func(
        tuple(routers.logits.values()), section["num_experts"], section["num_experts_per_tok"]
    )
    return section["moe_aux_loss_coeff"] / section["num_experts_per_tok"] * loss


def move_biases(routers: Routers, rate: float) -> None:
    """Section 2.1.2: after a step the bias of an overloaded expert goes down by γ, that of an underloaded one up."""
    for name, layer in routers.layers.items():
        bias = layer.gate.e_score_correction_bias
        loads = torch.bincount(routers.chosen[name].flatten(), minlength=len(bias)).double()
        bias[loads > loads.mean()] -= rate
        bias[loads < loads.mean()] += rate


def visible(documents: np.ndarray) -> torch.Tensor:
    """0 where a token sees another, else -inf: earlier ones of its own document; (B, 1, T, T)."""
    numbers = torch.from_numpy(documents)
    tokens = numbers.shape[1]
    seen = (numbers[:, :, None] == numbers[:, None, :]) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)[:, None]


def mean_loss(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Cross-entropy, the mean over the tokens that count."""
    labels, counts = torch.from_numpy(rows.labels), torch.from_numpy(rows.counts)
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (each * counts.flatten()).sum() / counts.sum()


def decay_groups(section: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """Two groups for AdamW. One-dimensional weights do not decay, but for the rules of the file, which name parts."""

    def decays(name: str, weight: torch.Tensor) -> bool:
        if any(part in name for part in section.get("weight_decay_include", ())):
            return True
        if any(part in name for part in section.get("weight_decay_exclude", ())):
            return False
        return weight.ndim > 1

    for decay in (True, False):
        group = [weight for name, weight in weights.items() if weight.requires_grad and decays(name, weight) is decay]
        yield {"params": group, "weight_decay": section["weight_decay"] if decay else 0.0}


def schedule(file: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm-up from 0, then half a cosine down to lr_end at the last step."""
    section = file["lr_scheduler"]
    assert section["type"] == "CosineWithWarmUpLR"
    return transformers.get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, section["warmup_steps"], file["training"]["steps"], min_lr=section.get("lr_end", 0.0)
    )


def train(
    file: Mapping[str, Any],
    initial: Mapping[str, np.ndarray],
    *,
    steps: int,
    balance: Callable[[Mapping[str, Any], Routers], torch.Tensor] = balance_loss,
) -> Run:
    """Train the model of a file from these weights on its data, for the first `steps` of its steps."""
    section, training, adamw = file["model"], file["training"], file["optimizer"]
    data = file["train_dataset"]["dataloader"]["config"]
    model, further = build(section)
    weights, routers = named_weights(model, further), Routers(model, further)
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        name: value.shape for name, value in initial.items()
    }
    for name, value in initial.items():
        weights[name].data.copy_(torch.from_numpy(value))
    optimizer = torch.optim.AdamW(
        decay_groups(adamw, weights), lr=file["lr_scheduler"]["learning_rate"], betas=adamw["betas"], eps=adamw["eps"]
    )
    rates = schedule(file, optimizer)
    size = training["global_batch_size"]
    samples = samples_of(data["data_path"][0], seq_length=data["seq_length"], seed=data["seed"])
    run = Run(dict(initial))
    for step in range(steps):
        rows = rows_of(samples[step * size : (step + 1) * size], data)
        numbers = {"lr": torch.tensor(rates.get_last_lr()[0], dtype=torch.float64), **forward(model, further, rows)}
        total = numbers["loss"] + section.get("mtp_loss_scaling_factor", 0.0) * numbers.get("mtp loss", 0.0)
        if routers.layers:
            numbers["balance loss"] = balance(file, routers)
            total = total + numbers["balance loss"]
        optimizer.zero_grad()
        total.backward()
        trained = [weight for weight in weights.values() if weight.requires_grad]
        numbers["grad norm"] = torch.nn.utils.clip_grad_norm_(trained, training["max_norm"])
        optimizer.step()
        rates.step()
        run.steps.append({name: value.detach().numpy() for name, value in numbers.items()})
        if routers.layers:
            run.steps[-1]["tokens of experts"] = routers.loads(
                section.get("num_experts") or section["n_routed_experts"]
            )
        if section.get("moe_router_enable_expert_bias"):
            move_biases(routers, section["moe_router_bias_update_rate"])
    run.final = {name: value.detach().numpy().copy() for name, value in weights.items()}
    return run


def forward(model: torch.nn.Module, further: MtpModel | None, rows: Rows) -> dict[str, torch.Tensor]:
    """The mean loss, and that of the prediction one token further (section 2.2)."""
    ids, positions, mask = torch.from_numpy(rows.ids), torch.from_numpy(rows.positions), visible(rows.documents)
    hidden = model.model(ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
    losses = {"loss": mean_loss(model.lm_head(hidden), rows)}
    if further is not None:
        ahead = one_further(rows)
        angles = model.model.rotary_emb(hidden, positions)
        embedded = model.model.embed_tokens(torch.from_numpy(ahead.ids))
        beyond = further.layers[0](embedded, hidden, angles, mask, None, None)
        losses["mtp loss"] = mean_loss(model.lm_head(beyond), ahead)
    return losses
