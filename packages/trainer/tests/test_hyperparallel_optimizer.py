"""AdamW on modules' parameters against AdamW on flat arrays."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from parallel_trainer.engines.hyperparallel.optimizer import AdamW
from parallel_trainer.optim.adamw import AdamW as FlatAdamW

SETTINGS = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


class Module(nn.Cell):
    """Parameters `first` and `second` that are trained, and `fixed`."""

    def __init__(self, values: dict[str, np.ndarray]) -> None:
        super().__init__(auto_prefix=False)
        for name, value in values.items():
            self.insert_param_to_cell(name, Parameter(Tensor(value), name=name))


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("float64", 1e-12)])
def test_updates_are_those_of_the_optimizer_on_flat_arrays(dtype: str, rtol: float) -> None:
    generator = np.random.default_rng(0)

    def numbers(*shape: int) -> np.ndarray:
        return generator.normal(size=shape).astype(dtype)

    values = {"first": numbers(3, 4), "second": numbers(5), "fixed": numbers(2)}
    module = Module(values)
    flat = np.concatenate([values["first"].reshape(-1), values["second"]])
    of_flat = FlatAdamW(flat, decay=np.repeat([True, False], [12, 5]), **SETTINGS)
    optimizer = AdamW([module], {"first": True, "second": False}, **SETTINGS)
    for step, lr in enumerate((1e-2, 0.0, 3e-2)):
        gradients = {"first": numbers(3, 4), "second": numbers(5), "fixed": numbers(2)}
        for name, parameter in module.parameters_and_names():
            # In the type in which they were added up, which may be another one.
            attribute = "main_grad" if step else "grad"
            object.__setattr__(parameter, attribute, Tensor(gradients[name]))
        assert of_flat.step(np.concatenate([gradients["first"].reshape(-1), gradients["second"]]), lr=lr)
        assert optimizer.step(lr)
    found = {name: parameter.asnumpy() for name, parameter in module.parameters_and_names()}
    np.testing.assert_allclose(found["first"].reshape(-1), flat[:12], rtol=rtol)
    np.testing.assert_allclose(found["second"], flat[12:], rtol=rtol)
    np.testing.assert_array_equal(found["fixed"], values["fixed"])
    assert np.abs(found["first"] - values["first"]).min() > 1e-4


def test_gradients_of_a_narrower_type_are_widened_and_none_changes_nothing() -> None:
    values = {"first": np.ones((2, 2), np.float32), "second": np.ones(2, np.float32)}
    module = Module(values)
    object.__setattr__(module.first, "main_grad", Tensor(np.full((2, 2), 0.5), ms.float16))
    assert AdamW([module], {"first": False, "second": False}, **SETTINGS).step(0.25)
    np.testing.assert_allclose(module.first.asnumpy(), np.full((2, 2), 0.75), rtol=1e-5)
    np.testing.assert_array_equal(module.second.asnumpy(), values["second"])


def test_an_update_without_gradients_or_elements_is_finite() -> None:
    module = Module({"first": np.ones((2, 0), np.float32), "second": np.ones(2, np.float32)})
    optimizer = AdamW([module], {"first": True, "second": True}, **SETTINGS)
    assert optimizer.step(0.1)
    object.__setattr__(module.first, "grad", Tensor(np.ones((2, 0), np.float32)))
    assert optimizer.step(0.1)


@pytest.mark.parametrize("spoilt", ["first", "second"])
def test_an_update_that_overflows_in_any_parameter_says_so(spoilt: str) -> None:
    values = {"first": np.ones((2, 3), np.float32), "second": np.ones(2, np.float32)}
    values[spoilt][-1] = 3.3e38
    module = Module(values)
    for name, value in values.items():
        object.__setattr__(getattr(module, name), "grad", Tensor(-np.ones_like(value)))
    settings = SETTINGS | {"weight_decay": 0.0}
    optimizer = AdamW([module], {"first": True, "second": True}, **settings)
    assert not optimizer.step(2e37)  # 3.5e38 is more than float32 holds
    found = {name: np.isfinite(getattr(module, name).asnumpy()).all() for name in values}
    assert found == {"first": spoilt != "first", "second": spoilt != "second"}
