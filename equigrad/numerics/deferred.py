"""Weight gradients on request. A pipeline schedule computes the gradient of an op's input now, of its weight later.

While a ``DeferredWeightGradients`` is active, weighted ops hand their weight gradients to it instead of computing them
in the backward pass; ``run`` computes them and adds them to ``parameter.grad``. So an op keeps its weights as
attributes of ``ctx`` and not among the saved tensors: of those a block that is computed again unpacks stand-ins, whose
gradients would go nowhere.
"""

from collections.abc import Callable, Sequence
from types import TracebackType

from torch import Tensor, no_grad

_active: "DeferredWeightGradients | None" = None


class DeferredWeightGradients:
    """Collects weight gradients of the backward passes inside its ``with`` block.

    >>> with DeferredWeightGradients() as later:
    ...     loss.backward()   # gradients of activations only
    >>> later.run()           # gradients of weights, in the order in which they were met
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def __enter__(self) -> "DeferredWeightGradients":
        global _active
        if _active is not None:
            raise RuntimeError("weight gradients are already being deferred")
        _active = self
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        global _active
        _active = None

    def __len__(self) -> int:
        return len(self._pending)

    @no_grad()
    def run(self) -> None:
        """Compute what was deferred and accumulate it; afterwards nothing is pending."""
        pending, self._pending = self._pending, []
        for parameter, compute in pending:
            gradient = compute()
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def is_deferred(parameter: Tensor) -> bool:
    """Whether this weight's gradient is to be computed later.

    Only leaves can be deferred: a weight that is itself computed needs its gradient at once.
    """
    return _active is not None and parameter.is_leaf


def weight_gradient(parameter: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    """The gradient of a weight for the backward of an op: its value, or None where it was deferred."""
    if _active is None or not is_deferred(parameter):
        return compute()
    _active._pending.append((parameter, compute))
    return None


def weight_gradients(
    parameters: Sequence[Tensor | None], needed: Sequence[bool], computes: Sequence[Callable[[], Tensor]]
) -> list[Tensor | None]:
    """``weight_gradient`` of each parameter that is ``needed``; the last ones may be without ``computes``."""
    ways = [*computes, *[None] * (len(parameters) - len(computes))]
    each = zip(parameters, needed, ways, strict=True)
    return [weight_gradient(p, way) if need and p is not None and way else None for p, need, way in each]
