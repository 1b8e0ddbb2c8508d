"""The load-balancing term: that of ``transformers`` where the last step was like this one, and additive over rows."""

import pytest
import torch

from equigrad.objectives.load_balance import load_balance


@pytest.mark.parametrize("chosen", [1, 2, 5])
def test_with_this_steps_own_loads_it_is_the_term_of_transformers(chosen: int) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(logits.topk(chosen).indices.flatten(), minlength=5)
    ours = load_balance([logits.softmax(1).sum(0)], (counts / 40)[None], 1, 40)
    torch.testing.assert_close(ours, load_balancing_loss_func((logits,), 5, chosen))


def test_rows_add_up_and_empty_rows_add_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [torch.rand(30, 4, generator=generator).softmax(1) for _ in range(3)]
    shares = torch.rand(3, 4, generator=generator)
    whole = load_balance([p.sum(0) for p in layers], shares, len(layers), 30)
    parts = [load_balance([p[rows].sum(0) for p in layers], shares, len(layers), 30)
             for rows in (slice(0, 7), slice(7, 7), slice(7, 30))]  # fmt: skip
    torch.testing.assert_close(sum(parts), whole)
    assert parts[1] == 0


def test_a_uniform_router_has_the_number_of_choices() -> None:
    even = [torch.full((8,), 20 / 8)] * 2
    assert load_balance(even, torch.full((2, 8), 3 / 8), 2, 20) == pytest.approx(3)
