"""PyTorch's kernel for CUDA divides by a number by multiplying with its reciprocal: so nothing in exact numerics is
divided by one, where it may be on a GPU. Seen from below, at the operations that a step calls, whoever writes them."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import equigrad
from equigrad.parallel.stop import StopRequest
from tests.exact_runs import EXACT
from tests.jobs import make_trainer, tiny_job
from tests.parallel.outcomes import SPARSE
from tests.parallel.test_layouts import ADAPTED, FURTHER, RECURRENT, SINKS

ROOT = Path(equigrad.__file__).parent
ON_THE_CPU = {"models/rope.py": "frequencies, before they go to a device"}


class Quotients(TorchDispatchMode):
    """Where in equigrad something is divided by a number, or averaged, which divides by a count."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.wrong = 0, set[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = function.overloadpacket.__name__.rstrip("_")
        if called in ("div", "true_divide", "divide", "mean", "var", "std"):
            self.all += 1
            if called != "div" or not isinstance(args[1], torch.Tensor):
                self.wrong.add(place())
        return function(*args, **kwargs or {})


def place() -> str:
    """The innermost file of equigrad that is being run, or of whoever calls."""
    frame = sys._getframe()
    files = []
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT):
            return file.relative_to(ROOT).as_posix()
        files.append(file.name)
        frame = frame.f_back  # type: ignore[assignment]
    return files[2]


def test_a_quotient_by_a_number_is_seen() -> None:
    x = torch.ones(3)
    with Quotients() as quotients:
        x / x
        assert not quotients.wrong
        for divide in (lambda: x / 3, lambda: x.clone().div_(3.0), lambda: torch.mean(x), lambda: 2 * x / 7):
            quotients.wrong.clear()
            divide()
            assert quotients.wrong


@pytest.mark.parametrize("changes", [SPARSE, SINKS, ADAPTED, FURTHER, RECURRENT])
def test_a_step_divides_by_tensors_alone(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(tiny_job(**changes, **EXACT), tmp_path)
    batch = trainer.stream.next_batch()
    with Quotients() as quotients:
        trainer.update(batch, StopRequest())
    assert quotients.all
    assert quotients.wrong <= set(ON_THE_CPU)
