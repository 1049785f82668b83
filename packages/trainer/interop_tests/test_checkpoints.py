"""What transformers saved, imported and run by two ranks under each kind of plan; and what they save, exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from parallel_trainer.checkpoint.index import Checkpoint
from parallel_trainer.cli import main
from parallel_trainer.data.indexed import IndexedWriter
from parallel_trainer.launch.mpiexec import run_ranks
from peers import CASES, VOCABULARY, micro_batch, peer_model
from transformers import AutoModelForCausalLM

TOLERANCE = 2e-5  # as for one rank
PLANS = {
    "tp": "tensor_parallel: 2",
    "pp": "pipeline_parallel: 2, pipeline_parallel_layers_per_stage: auto",
    "ep": "expert_parallel: 2",
}
RUNS = {
    ("tp", "qwen3 all at once"): 2,
    ("tp", "qwen3_moe"): 2,
    ("tp", "deepseek_v3"): 2,
    ("pp", "qwen3 tied"): 1,
    ("pp", "qwen3_moe one dense layer"): 1,
    ("pp", "deepseek_v3 yarn that scales"): 1,
    ("ep", "qwen3_moe normalized"): 2,
    ("ep", "deepseek_v3 two shared experts"): 2,
}
"""Plan and model, and how many ranks end with logits."""

FILE = """
training: {{steps: 1, global_batch_size: 4, local_batch_size: 2}}
parallelism: {{{plan}}}
checkpoint: {{load_path: {imported}, no_load_optim: true, enable_save: false}}
lr_scheduler: {{type: ConstantWarmUpLR, learning_rate: 1.0e-2, warmup_steps: 0}}
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [8, 0, 0]
    config: {{data_path: [{corpus}], split: "1, 0, 0", seq_length: 16, eod: 0, create_attention_mask: false,
             create_compressed_eod_mask: false}}
{model}  seq_length: 16
"""


def name_of(run):
    return "-".join(run).replace(" ", "_")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder in which two ranks ran everything."""
    folder = tmp_path_factory.mktemp("ranks")
    models = tmp_path_factory.mktemp("models")
    generator = np.random.default_rng(0)
    with IndexedWriter(models / "corpus", vocab_size=VOCABULARY) as corpus:
        for _ in range(20):
            corpus.add_document(np.append(generator.integers(1, VOCABULARY, 40), 0))
    for run in RUNS:
        plan, case = run
        saved, imported = models / name_of(run), models / f"{name_of(run)}-imported"
        peer_model(CASES[case]).save_pretrained(saved, max_shard_size="20KB")
        assert main(["checkpoint", "import-hf", str(saved), str(imported)]) == 0
        model = Checkpoint.open(imported).config
        (folder / name_of(run)).mkdir()
        text = FILE.format(plan=PLANS[plan], imported=imported, corpus=models / "corpus", model=model)
        (folder / name_of(run) / "run.yaml").write_text(text)
    np.save(folder / "ids.npy", micro_batch().input_ids)
    assert run_ranks(2, [str(Path(__file__).with_name("ranks.py")), str(folder)]) == 0
    return folder


def their_logits(model):
    return model(torch.from_numpy(micro_batch().input_ids).long()).logits.detach().numpy()


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_two_ranks_give_the_logits_of_transformers_before_and_after_training(ran, tmp_path, run):
    expected = {"imported": their_logits(peer_model(CASES[run[1]]))}
    code = main(["checkpoint", "export-hf", str(ran / name_of(run) / "saved"), str(tmp_path / "exported")])
    assert code == 0
    expected["trained"] = their_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "exported"))
    assert np.abs(expected["trained"] - expected["imported"]).max() > 0.1
    files = sorted((ran / name_of(run)).glob("logits-*.npz"))
    assert len(files) == RUNS[run]
    for file in files:
        with np.load(file) as found:
            for when, values in expected.items():
                assert np.abs(found[when] - values[found["rows"]]).max() < TOLERANCE, (file.name, when)
