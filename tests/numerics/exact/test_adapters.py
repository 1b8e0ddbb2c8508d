"""Adapters of routed experts in exact numerics."""

from pathlib import Path

from tests.parallel.outcomes import SPARSE, three_steps

ADAPTED = SPARSE | {"lora": {"rank": 3, "targets": ["q_proj", r".*\.experts\..*"]}}


def test_adapters_of_experts_have_the_gradients_of_native_numerics(tmp_path: Path) -> None:
    native, exact = (three_steps({}, ADAPTED | {"numerics__kind": kind}, tmp_path) for kind in ("native", "exact"))
    assert exact["counts"][0] == native["counts"][0]
    for step in range(3):
        assert exact["gradients"][step].keys() == native["gradients"][step].keys()
        for name, gradient in native["gradients"][step].items():
            assert (exact["gradients"][step][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, (step, name)
