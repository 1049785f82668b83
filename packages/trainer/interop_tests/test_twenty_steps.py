"""Twenty steps of training here and by another trainer, from the same file: the same losses, norms and weights.

`peer_trainer.py` is the other one. Every quantity of every step agrees to 1e-9 of its largest element, in float64 on
one rank; and each fault that is planted in our run shows where it must.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import peer_trainer
import pytest
import torch
import yaml
from planted_faults import FAULTS
from run_record import differences, initial_surprises
from steps_cases import CASES, ONE_LAYER_OF_EXPERTS, file_of, merged, our_run, write_corpus

TOLERANCE = 1e-9
FOUND = 1e-6
"""A planted fault makes a difference of at least this much."""
FAULTY_STEPS = 8
SURPRISE = 5.0
"""Standard errors that a weight may be from its declared mean or deviation: chance goes so far once in a million."""


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    """transformers computes norms, routers and angles in float32 whatever the model's type: here that is float64."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Of arrays as small as these a second thread has nothing, and waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(prefix)
    return prefix


@pytest.fixture(scope="module")
def case_file(corpus):
    return lambda case: file_of(CASES[case], corpus)


@pytest.fixture(scope="module")
def reference(case_file, tmp_path_factory):
    """What the other trainer does with a case from the weights that we begin with, in so many steps."""

    @cache
    def run(case, steps):
        initial = our_run(case_file(case), tmp_path_factory.mktemp("run"), steps=0).initial
        return peer_trainer.train(case_file(case), initial, steps=steps)

    return run


def apart(ours, theirs):
    return [difference for difference in differences(ours, theirs) if difference.relative > TOLERANCE]


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps(case, case_file, reference, tmp_path):
    ours, theirs = our_run(case_file(case), tmp_path, steps=20), reference(case, 20)
    surprises = initial_surprises(ours.initial, case_file(case)["model"]["initializer_range"])
    assert max(surprises.values()) < SURPRISE, max(surprises, key=surprises.get)
    found = apart(ours, theirs)
    assert not found, f"{len(found)} quantities differ, first {found[0]}"


@pytest.mark.parametrize("case", CASES)
def test_what_is_compared_happened(case, case_file, reference):
    """Training learns, some steps are clipped and some are not, experts' loads differ, and every weight moves."""
    theirs = reference(case, 20)
    losses = [float(step["loss"]) for step in theirs.steps]
    assert losses[-1] < 0.9 * losses[0]
    clipped = [float(step["grad norm"]) > case_file(case)["training"]["max_norm"] for step in theirs.steps]
    assert any(clipped)
    assert not all(clipped)
    assert all((theirs.final[name] != values).any() for name, values in theirs.initial.items())
    if "tokens of experts" in theirs.steps[0]:
        assert all(np.ptp(step["tokens of experts"], axis=1).all() for step in theirs.steps)


def test_transformers_own_balancing_loss(corpus, tmp_path):
    file = file_of(ONE_LAYER_OF_EXPERTS, corpus)
    ours = our_run(file, tmp_path, steps=20)
    theirs = peer_trainer.train(file, ours.initial, steps=20, balance=peer_trainer.transformers_balance_loss)
    assert not apart(ours, theirs)


@pytest.mark.filterwarnings("ignore:Extensions of this project")
@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name, case_file, reference, tmp_path, monkeypatch):
    fault = FAULTS[name]
    file = case_file(fault.case)
    theirs = reference(fault.case, FAULTY_STEPS)
    fault.patch(monkeypatch)
    ours = our_run(merged(file, yaml.safe_load(fault.edit)), tmp_path, steps=FAULTY_STEPS if fault.first else 0)
    if fault.first is None:
        assert max(initial_surprises(ours.initial, file["model"]["initializer_range"]).values()) > 2 * SURPRISE
        return
    found = apart(ours, theirs)
    assert (found[0].step, found[0].quantity) == fault.first
    assert max(difference.relative for difference in found) > FOUND
