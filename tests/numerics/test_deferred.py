"""Weight gradients that come later, of whole models: all of them do, and none is lost."""

from pathlib import Path
from typing import Any

import pytest
import torch

from equigrad.numerics.deferred import DeferredWeightGradients
from equigrad.numerics.row import Row
from tests.jobs import make_trainer, tiny_job
from tests.parallel.outcomes import SPARSE
from tests.parallel.test_layouts import ADAPTED, FURTHER, RECURRENT, SINKS


@pytest.mark.parametrize("changes", [SPARSE, SINKS, ADAPTED, RECURRENT, FURTHER], ids=range(5))
def test_weights_are_not_among_the_saved_tensors(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Whoever packs those away, to compute them again or to keep them elsewhere, unpacks copies; a gradient that was
    added to a copy of a weight would be lost."""
    grads = []
    for later in (False, True):
        model = make_trainer(tiny_job(**changes), tmp_path).model
        ids, row = torch.arange(90) % 257, Row.of([70, 20])
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
            loss = model(ids, row, ids).sum()
        if later:
            with DeferredWeightGradients() as deferred:
                loss.backward()
            assert all(parameter.grad is None for parameter in model.parameters())
            deferred.run()
        else:
            loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, now in grads[0].items():
        assert torch.equal(now, grads[1][name]), name
