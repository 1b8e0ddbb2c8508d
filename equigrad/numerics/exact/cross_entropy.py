"""Exact cross-entropy from hidden states, in chunks of tokens as the native one, be the vocabulary here or divided.

*Grids.* Exponentials less the largest logit are at most 1, so their sum has a fixed grid. The error of a logit,
p - onehot, is at most 1 too, so the error times what the loss is multiplied by, over the temperature, is at most that:
the only channel of the head's outputs, ``loss``. It has more bits than the inputs: most tokens of a large vocabulary
have small probabilities.

*Temperature.* A logit over it is rounded to float32 at one place, ``tempered``, for training and for sampling alike: so
both have the same log-probabilities, whose sums are exact.

Where the embedding is the head too, its gradient is one sum with the head's, over twice as many terms: a token of the
input counts as one whose error is a power of two, in the channels ``further``.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from equigrad.numerics.cross_entropy import chunks, own_columns
from equigrad.numerics.deferred import is_deferred, weight_gradient
from equigrad.numerics.exact.elementary import exp, log, quotient
from equigrad.numerics.exact.fused import fused
from equigrad.numerics.exact.grids import columns, fixed, largest_across, operand_bits, rows, term_bits, value
from equigrad.numerics.exact.layers import LayerGrids
from equigrad.numerics.exact.linear import back_product, finish, group_of, plus, product, scaled, token_product
from equigrad.parallel.collectives import Split, gathered, reduce_scattered

HEAD_EXTRA = 6
"""Bits that the errors of logits have more than the inputs, in the gradient of the head."""
_WIDE_EXTRA = 9
"""And more than the weights, in that of the inputs, a sum over the vocabulary."""


class Head(NamedTuple):
    """
    budget: bytes up to which the logits are kept for the backward pass
    tokens: of this rank in the residual stream
    tensor: the ranks that share the vocabulary
    scale:  of an adapter
    temperature: what logits are divided by
    """

    dtype: torch.dtype
    budget: int
    tokens: int
    tensor: Split | None
    scale: float
    grids: LayerGrids
    temperature: float = 1.0

    @property
    def vocabulary(self) -> int:
        return self.grids.outputs


class Logits:
    """Of tokens ``x`` [tokens, H], and of what an adapter made of them [tokens, r], some at a time. The matrices are
    put onto their grids once."""

    def __init__(self, x: Tensor, weight: Tensor, low: Tensor | None, b: Tensor | None, head: Head) -> None:
        self._dtype, self._terms = head.dtype, list[tuple[Tensor, Tensor, int]]()
        for inputs, matrix, length in ((x, weight, head.grids.inputs), (low, b, 0 if low is None else low.shape[1])):
            if inputs is not None and matrix is not None:
                first, second = operand_bits(length)
                self._terms.append((inputs, rows(matrix, second).t(), first))

    def __call__(self, part: slice) -> Tensor:
        """[n, V here] float32."""
        (x, weight, bits), *adapter = self._terms
        y = finish(rows(x[part], bits) @ weight, None, self._dtype)
        for low, b, bits in adapter:
            y = plus(y, rows(low[part], bits) @ b)
        return y.float()


def tempered(x: Tensor, temperature: float | Tensor) -> Tensor:
    """``x`` [n, ...] over a temperature, or over one for each of n, float32."""
    if isinstance(temperature, Tensor):
        return (x.double() / temperature.double().view(-1, *[1] * (x.ndim - 1))).float()
    return x if temperature == 1 else quotient(x.double(), temperature).float()


@fused
def _top(logits: Tensor) -> Tensor:
    return logits.amax(1, keepdim=True)


@fused
def _sum(logits: Tensor, top: Tensor, bits: int) -> Tensor:
    terms = exp(logits.double() - top.double())
    return fixed(terms, bits).sum(1)


@fused
def _loss(top: Tensor, total: Tensor, label: Tensor) -> Tensor:
    return (top.double() + log(total) - label + 0.0).float()


@fused
def _errors(logits: Tensor, top: Tensor, total: Tensor, label: Tensor, here: Tensor, dloss: Tensor) -> Tensor:
    """(p - onehot) times the gradient of the loss."""
    p = (exp(logits.double() - top.double()) / total[:, None]).float().double()
    column = torch.arange(logits.shape[1], device=logits.device)
    chosen = (column == label[:, None]) & here[:, None]
    return (torch.where(chosen, p - 1, p) * dloss[:, None].double() + 0.0).float()


class CrossEntropy(torch.autograd.Function):
    """Of ``x`` [own tokens, H], at the tokens ``at`` [n] of all tensor ranks (None: all), whose labels are given.

    ``a`` [r, H] and ``b`` [V here, r]: of an adapter. Keeps the logits while they fit the budget, else they are made
    again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, at: Tensor | None, head: Head,
        a: Tensor | None, b: Tensor | None,
    ) -> Tensor:  # fmt: skip
        own_x, x = x, at_tokens(x, at, head)
        low = adapted(x, a, head)
        tokens, vocabulary = len(x), head.vocabulary
        keep = 4 * tokens * vocabulary <= head.budget
        kept = torch.empty(tokens if keep else 0, len(weight), device=x.device)
        loss, tops = (torch.empty(tokens, device=x.device) for _ in range(2))
        totals = torch.empty(tokens, dtype=torch.float64, device=x.device)
        own, here = own_columns(labels, head.tensor, vocabulary)
        logits = Logits(x, weight, low, b, head)
        for part in chunks(tokens, vocabulary):
            z = tempered(logits(part), head.temperature)
            if keep:
                kept[part] = z
            top = _top(z)
            label = z.gather(1, own[part, None]).squeeze(1).where(here[part], 0.0)
            if head.tensor is not None:
                top = largest_across(top, head.tensor.group)
            sums = torch.stack([_sum(z, top, term_bits(vocabulary) - 1), label.double()])
            if head.tensor is not None:
                dist.all_reduce(sums, group=head.tensor.group)
            loss[part], tops[part], totals[part] = _loss(top[:, 0], *sums), top[:, 0], sums[0]
        ctx.save_for_backward(own_x, labels, at, kept, tops, totals)
        ctx.weight, ctx.a, ctx.b, ctx.head, ctx.keep = weight, a, b, head, keep
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, _, _, _, needs_a, needs_b = ctx.needs_input_grad
        head, weight, a, b = ctx.head, ctx.weight, ctx.a, ctx.b
        x, _, at, *_ = ctx.saved_tensors
        gradients = partial(_gradients, ctx.saved_tensors, weight, a, b, head, ctx.keep, dloss)
        later = needs_weight and is_deferred(weight), needs_b and is_deferred(b)
        total, low_total, dw, db = gradients(needs_x, needs_weight and not later[0], needs_b and not later[1])
        if later[0]:
            dw = weight_gradient(weight, lambda: gradients(False, True, False)[2])
        if later[1]:
            db = weight_gradient(b, lambda: gradients(False, False, True)[3])
        dx = da = None
        if total is not None:
            dx = value(_at_own(total, at, head), head.dtype)
        if low_total is not None:
            dlow = scaled(_at_own(low_total, at, head), head.scale, head.dtype)
            dx = None if dx is None else plus(dx, back_product(dlow, a, a.shape[0]))
            if needs_a:
                grids, own = head.grids, x.to(head.dtype)
                da = weight_gradient(a, partial(token_product, grids["a.out"], dlow, grids["a.in"], own))
        return (None if dx is None else dx.to(x.dtype)), dw, None, None, None, da, db


def at_tokens(x: Tensor, at: Tensor | None, head: Head) -> Tensor:
    """The tokens at which a head is wanted, whole on every tensor rank."""
    x = gathered(x.to(head.dtype), head.tensor)
    return x if at is None else x.index_select(0, at)


def adapted(x: Tensor, a: Tensor | None, head: Head) -> Tensor | None:
    """What the first matrix of an adapter, if there is one, makes of ``x``."""
    return None if a is None else scaled(product(x, a, head.grids.inputs), head.scale, head.dtype)


def _at_own(total: Tensor, at: Tensor | None, head: Head) -> Tensor:
    """From parts of exact sums at the tokens ``at`` to the sums of own tokens, zero at other tokens."""
    if head.tensor is not None and at is not None:
        total = total.new_zeros(head.tensor.partition.total, *total.shape[1:]).index_copy_(0, at, total)
    elif at is not None:
        total = total.new_zeros(head.tokens, *total.shape[1:]).index_copy_(0, at, total)
    return reduce_scattered(total, head.tensor)


def _gradients(
    saved: Sequence[Tensor],
    weight: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    head: Head,
    keep: bool,
    dloss: Tensor,
    needs_x: bool,
    needs_weight: bool,
    needs_b: bool,
) -> list[Any]:
    """Those that are needed, float64: of the input at each token, of which tensor ranks add up theirs; so that of what
    an adapter made of it; of the weight, and of an adapter's second matrix."""
    own_x, labels, at, kept, tops, totals = saved
    x = at_tokens(own_x, at, head)
    low, grids, across = adapted(x, a, head), head.grids, group_of(head.tensor)
    own, here = own_columns(labels, head.tensor, head.vocabulary)
    first, second = operand_bits(head.vocabulary, _WIDE_EXTRA)
    dloss = tempered(dloss, head.temperature)
    # Of each matrix what it is multiplied by, and the sum: for the gradient of its input, and for its own.
    products: list[tuple[Tensor, Tensor] | None] = [None, None]
    sums: list[tuple[Tensor, Tensor] | None] = [None, None]
    each = (weight, x, "in", needs_weight), (b, low, "b.in", needs_b)
    for place, (w, inputs, name, needed) in enumerate(each):
        if w is None or inputs is None:
            continue
        if needs_x:
            products[place] = columns(w, second, across), w.new_zeros(len(x), w.shape[1])
        if needed:
            sums[place] = grids[name].round(inputs), torch.zeros_like(w)
    if any(sums):
        grids["loss"].see(dloss[:, None])
    logits = None if keep else Logits(x, weight, low, b, head)
    for part in chunks(len(x), head.vocabulary):
        z = kept[part] if logits is None else tempered(logits(part), head.temperature)
        error = _errors(z, tops[part, None], totals[part], own[part], here[part], dloss[part])
        if any(products):
            by_token = rows(error, first, across)
            for found in products:
                if found is not None:
                    torch.mm(by_token, found[0], out=found[1][part])
        if any(sums):
            by_channel = grids["loss"].onto(error)
            for found in sums:
                if found is not None:
                    found[1].addmm_(by_channel.t(), found[0][part])
    return [None if found is None else found[1] for found in (*products, *sums)]


class Distribution:
    """See ``Ops.distribution``: in the bits of the cross-entropy, whatever ranks computed it."""

    def __init__(self, logits: Tensor, temperature: Tensor) -> None:
        self._logits = tempered(logits, temperature)
        self._bits = term_bits(logits.shape[1]) - 1
        self._top = _top(self._logits)
        self.terms = fixed(exp(self._logits.double() - self._top.double()), self._bits)
        self.total = _sum(self._logits, self._top, self._bits)

    def log_probability(self, chosen: Tensor, mass: Tensor) -> Tensor:
        label = self._logits.gather(1, chosen[:, None]).squeeze(1)
        return -_loss(self._top[:, 0], mass, label.double())

    def entropy(self) -> Tensor:
        # -x log x is below 1 for x from 0 to 1: a sum with the grid of the terms.
        less = self._top.double() - self._logits.double()
        weighted = fixed(exp(-less) * less, self._bits).sum(1)
        return (log(self.total) + weighted / self.total).float()
