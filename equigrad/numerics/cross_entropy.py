"""Cross-entropy from hidden states: logits are made in chunks and never all held at once, be the vocabulary here or
divided over tensor ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from equigrad.numerics.deferred import is_deferred, weight_gradient
from equigrad.parallel.collectives import Split

# Logits are made in chunks of about this many elements (4 MB in float32), but of at least 256 tokens, so that the
# product stays efficient.
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Head:
    """How a cross-entropy is computed.

    dtype:      operands of the products
    budget:     bytes up to which p - onehot is kept for the backward pass
    vocabulary: columns of the logits on all ranks together
    tensor:     the ranks that share them; None: they are all here
    scale:      of an adapter
    temperature: what logits are divided by
    """

    dtype: torch.dtype
    budget: int
    vocabulary: int
    tensor: Split | None
    scale: float
    temperature: float = 1.0

    def probabilities(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax, in place, and the loss [n] of each label."""
        if self.tensor is None:
            label = logits.gather(1, labels[:, None])
            top, where = logits.max(1, keepdim=True)
            softmax = torch.softmax(logits, 1, out=logits)
            # log sum exp = top - log p(top), and p(top) >= 1/V never underflows
            return softmax, torch.sub(top - softmax.gather(1, where).log_(), label).squeeze(1)
        own, here = own_columns(labels, self.tensor, self.vocabulary)
        top = logits.amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX, self.tensor.group)
        label = logits.gather(1, own[:, None]).squeeze(1).where(here, 0.0)
        exponentials = logits.sub_(top[:, None]).exp_()
        sums = torch.stack([exponentials.sum(1), label])
        dist.all_reduce(sums, group=self.tensor.group)
        return exponentials.div_(sums[0, :, None]), top + sums[0].log() - sums[1]

    def errors(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """p - onehot, in place, and the loss. Subtracted in float32 before anything is rounded: near p = 1 the
        difference is all there is."""
        softmax, loss = self.probabilities(logits, labels)
        own, here = own_columns(labels, self.tensor, self.vocabulary)
        return softmax.scatter_add_(1, own[:, None], -here[:, None].to(softmax.dtype)), loss


def own_columns(labels: Tensor, tensor: Split | None, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Each label's column on this rank, and whether it is one; 0 where it is not."""
    if tensor is None:
        return labels, torch.ones_like(labels, dtype=torch.bool)
    first, stop = tensor.share(vocabulary)
    here = (labels >= first) & (labels < stop)
    return (labels - first).where(here, 0), here


def chunks(tokens: int, vocabulary: int) -> list[slice]:
    """The same on all ranks that share the vocabulary, for each chunk costs them two sums."""
    size = max(256, _CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


class CrossEntropy(torch.autograd.Function):
    """Chunked over tokens. What the backward pass needs, p - onehot with p = softmax(x w^T), is kept while it fits the
    budget, else made again. The incoming gradient scales rows of x and dx, which are V/H times smaller.

    ``low`` [n, r] and ``b`` [V, r]: what an adapter made of x, and what makes logits of it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, head: Head, low: Tensor | None, b: Tensor | None
    ) -> Tensor:
        xq = x.to(head.dtype)
        lowq = None if low is None else low.to(head.dtype) * head.scale
        logits_of = _logits(xq, weight, lowq, b, head.temperature)
        tokens = x.shape[0]
        needed = any(ctx.needs_input_grad)
        keep = needed and tokens * head.vocabulary * 4 <= head.budget
        kept = torch.empty(tokens if keep else 0, len(weight), device=x.device)
        # A tensor of its own, not a view: FSDP warns of modules that return views.
        loss = torch.empty(tokens, device=x.device)
        for part in chunks(tokens, head.vocabulary):
            logits = logits_of(part, kept[part] if keep else None)
            step = head.errors if keep else head.probabilities
            loss[part] = step(logits, labels[part])[1]
        ctx.save_for_backward(xq, labels, kept, lowq)
        ctx.weight, ctx.b, ctx.x_dtype, ctx.head, ctx.keep = weight, b, x.dtype, head, keep
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, _, _, needs_low, needs_b = ctx.needs_input_grad
        weight, b = ctx.weight, ctx.b
        gradients = partial(_head_gradients, ctx.saved_tensors, weight, b, ctx.keep, ctx.head, dloss)
        weight_later, b_later = (n and is_deferred(of) for n, of in ((needs_weight, weight), (needs_b, b)))
        now = (needs_x, needs_weight and not weight_later, needs_low, needs_b and not b_later)
        dx, dw, dlow, db = gradients(now)
        if weight_later:
            dw = weight_gradient(weight, lambda: cast(Tensor, gradients((False, True, False, False))[1]))
        if b_later:
            db = weight_gradient(b, lambda: cast(Tensor, gradients((False, False, False, True))[3]))
        dlow = None if dlow is None else dlow.to(ctx.head.dtype)
        return None if dx is None else dx.to(ctx.x_dtype), dw, None, None, dlow, db


def _logits(
    xq: Tensor, weight: Tensor, lowq: Tensor | None, b: Tensor | None, temperature: float
) -> Callable[[slice, Tensor | None], Tensor]:
    """What gives the logits of some tokens over the temperature, in float32, written into a tensor if one is given."""
    wq = weight.to(xq.dtype)
    bt = None if b is None else b.to(xq.dtype).t()

    def logits(part: slice, out: Tensor | None) -> Tensor:
        product = _product(xq[part], wq, out)
        if lowq is not None and bt is not None:
            _accumulate_product(product, lowq[part], bt)
        return product if temperature == 1 else product.div_(temperature)

    return logits


def _head_gradients(
    saved: tuple[Tensor, ...],
    weight: Tensor,
    b: Tensor | None,
    keep: bool,
    head: Head,
    dloss: Tensor,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of a cross-entropy that are needed: of the input (float32) and of the weight, and of what an adapter
    made of the input (float32) and of its second matrix."""
    xq, labels, kept, lowq = saved
    logits_of, d = _logits(xq, weight, lowq, b, head.temperature), dloss[:, None]
    d = d if head.temperature == 1 else d / head.temperature
    gradients: list[Tensor | None] = []
    products = []
    # An input and the weight that makes logits of it, and the same of an adapter.
    for x, w, needs_x, needs_w in ((xq, weight, *needs[:2]), (lowq, b, *needs[2:])):
        dx = dw = None
        if w is not None and (needs_x or needs_w):
            dx = torch.empty(x.shape, device=x.device) if needs_x else None
            dw = torch.zeros_like(w) if needs_w else None
            products.append((dx, dw, w.to(xq.dtype).t(), (x * d).to(xq.dtype)))
        gradients += [dx, dw]
    # What is kept needs no chunks: each would read and write the weight's whole gradient once more.
    for part in [slice(None)] if keep else chunks(len(labels), head.vocabulary):
        if keep:
            error = kept[part].to(xq.dtype)
        else:
            error = head.errors(logits_of(part, None), labels[part])[0].to(xq.dtype)
        for dx, dw, wt, scaled in products:
            if dx is not None:
                _product(error, wt, dx[part])
            if dw is not None:
                _accumulate_product(dw, error.t(), scaled[part])
    for dx, factor in zip(gradients[::2], (d, d * head.scale), strict=True):
        if dx is not None:
            dx.mul_(factor)
    return tuple(gradients)


def _product(x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    """``x weight^T`` in float32, written into ``out`` if given."""
    if x.dtype == torch.float32:
        return torch.mm(x, weight.t(), out=out)
    product = x @ weight.t()
    return product.float() if out is None else out.copy_(product)


def _accumulate_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


class Distribution:
    """See ``Ops.distribution``; in float32, but for sums."""

    def __init__(self, logits: Tensor, temperature: Tensor) -> None:
        logits = logits.float()
        self._less = (logits - logits.amax(1, keepdim=True)).div_(temperature.float()[:, None])
        self.terms = self._less.exp()
        self.total = self.terms.sum(1, dtype=torch.float64)

    def log_probability(self, chosen: Tensor, mass: Tensor) -> Tensor:
        return (self._less.gather(1, chosen[:, None]).squeeze(1) - mass.log()).float()

    def entropy(self) -> Tensor:
        # Not -inf, which times a probability of zero is no number.
        weighted = self.terms * self._less.clamp(min=-1e4)
        return (self.total.log() - weighted.sum(1, dtype=torch.float64) / self.total).float()
