"""The ops of a layer for one micro-batch on one rank: operations, bytes moved, bytes kept. No seconds here."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from equigrad.plan.shape import Layer, seen_keys
from equigrad.plan.workload import LOW, Workload


class Op(NamedTuple):
    """One op of one layer and micro-batch on one rank.

    part:     what it is counted as
    product:  rows, inner and columns of a matrix product, or None
    flops:    operations of the forward pass; the backward pass has ``backward`` times as many
    moved:    bytes that it moves to and from memory, forward and backward
    saved:    bytes that it leaves for the backward pass
    """

    name: str
    part: Literal["products", "attention", "elementwise"]
    product: tuple[int, int, int] | None = None
    flops: float = 0.0
    backward: float = 2.0
    moved: tuple[float, float] = (0.0, 0.0)
    saved: float = 0.0

    @property
    def linear(self) -> bool:
        """Whether it is a product with a weight."""
        return self.part == "products" and self.name != "attention"

    @property
    def sizes(self) -> tuple[float, float, float]:
        """Entries of a linear layer's input, weight and output, of all experts together; zeros for other ops."""
        if self.product is None or not self.linear:
            return 0.0, 0.0, 0.0
        rows, inner, columns = self.product
        times = self.flops / (2.0 * rows * inner * columns)
        return times * rows * inner, times * inner * columns, times * rows * columns


def product(name: str, rows: int, inner: int, columns: int, saved: float = 0.0) -> Op:
    """A linear layer. It moves both operands and the result once; the two products of the backward pass likewise."""
    once = LOW * (rows * inner + inner * columns + rows * columns)
    return Op(name, "products", (rows, inner, columns), 2.0 * rows * inner * columns, 2.0, (once, 2 * once), saved)


def in_8_bits(op: Op, every: float) -> list[Op]:
    """A linear layer in 8-bit floating point: operands of one byte, and the casts. Both operands, and backward the
    gradient, are read for their maximum, read again, and written twice, for the products of either direction want
    different orders. ``every``: the share of micro-batches for which weights are cast."""
    if not op.linear:
        return [op]
    enters, weights, leaves = op.sizes
    # Backward two products, each of two of them, that write the third.
    moved = enters + weights + LOW * leaves, (1 + LOW) * (enters + weights) + 2 * leaves
    each = 2 * LOW + 1 + 1
    casts = each * (enters + every * weights), each * leaves
    return [op._replace(moved=moved), Op(f"{op.name} cast", "elementwise", moved=casts)]


def elementwise(name: str, entries: float, forward: float, backward: float, saved: float = 0.0) -> Op:
    """Work on so many entries, that moves so many bytes for each and leaves so many."""
    return Op(name, "elementwise", moved=(entries * forward, entries * backward), saved=entries * saved)


def layer_ops(work: Workload, layer: Layer) -> list[Op]:
    """The ops of a layer for one micro-batch on one rank, in order. Bytes are counted kernel by kernel: each reads its
    operands and writes its results once. Saved bytes add up to the closed forms of arXiv 2205.05198 where those apply.
    """
    shape, tp = work.shape, work.layout.tp
    hidden, tokens = shape.hidden, work.row_tokens
    ends = work.norm_tokens * hidden
    wide, mask = work.state.residual, work.dropout * 1.0
    entering = LOW * hidden * (tokens if work.keeps_gathered else work.norm_tokens)
    # Reading x, writing y; backward reads x and dy twice (for input and weight) and writes dx.
    norm = (wide + LOW, 2 * wide + 2 * LOW + wide)
    # The sum of two; backward the gradients of both ways are read, and their sum is written. Fused with the norm that
    # follows, one of each is at hand.
    eager = not work.fused
    add = (wide + LOW + wide * eager + 2 * LOW * mask, (2 * wide + LOW + 3 * mask) * eager + wide * work.fused)
    heads, width = work.local_heads, work.local_heads * shape.head_size
    ops = [
        elementwise("attention norm", ends, *norm, saved=wide),
        product("query, key, value", tokens, hidden, -(-shape.projected // tp), entering),
        *_attention(work, layer, heads),
        product("attention output", tokens, width, hidden, LOW * tokens * width),
        elementwise("attention residual", ends, *add, saved=mask),
        elementwise("feed-forward norm", ends, *norm, saved=wide),
    ]
    if inner := shape.shared(layer):
        ops += _feed_forward(work, tokens, -(-inner // tp), entering)
    if layer.sparse and shape.experts is not None:
        ops += _experts(work)
    ops.append(elementwise("feed-forward residual", ends, *add, saved=mask))
    if shape.biases:  # their gradients are sums of the gradients of what they were added to
        ops.append(elementwise("biases", sum(op.sizes[2] for op in ops), 0.0, LOW))
    if not work.fp8:
        return ops
    # Weights that are gathered anew are cast anew.
    every = 1.0 if work.shards > 1 and work.layout.reshard_after_forward else 1 / work.micro_batches
    return [made for op in ops for made in in_8_bits(op, every)]


def _attention(work: Workload, layer: Layer, heads: int) -> list[Op]:
    shape, tokens = work.shape, work.row_tokens
    width, saved = heads * shape.head_size, LOW * tokens * -(-shape.projected // work.layout.tp)
    rotary = [] if shape.positions else [_rotary(work)]
    if work.attention != "unfused":
        flops = 4.0 * width * tokens * seen_keys(work.sequence, layer.window)
        # The backward pass computes scores again: five products for two.
        return [*rotary, Op("attention", "attention", None, flops, 2.5, saved=saved + 4 * tokens * heads)]
    scores, mask = float(heads * tokens * work.sequence), work.dropout * 1.0
    # Forward: scores written, read and written by the softmax, read for the values. Backward: their gradient written,
    # read with the probabilities and written by the softmax, read twice; probabilities once. Dropout reads, writes.
    traffic = (4 * LOW + (2 * LOW + 1) * mask, 7 * LOW + (2 * LOW + 1) * mask)
    # The mask's byte and what is left after dropout.
    kept = LOW + (LOW + 1) * mask
    return [
        *rotary,
        Op("attention", "products", (work.sequence, shape.head_size, work.sequence), 4.0 * width * tokens
           * work.sequence, 2.0, saved=saved),
        elementwise("attention scores", scores, *traffic, saved=kept),
    ]  # fmt: skip


def _rotary(work: Workload) -> Op:
    """Of queries and keys. Unfused they are cast to float32, rotated, and cast back."""
    shape = work.shape
    entries = work.row_tokens * (shape.heads + shape.kv_heads) * shape.head_size / work.layout.tp
    each = 2 * LOW if work.fused else (LOW + 4) + (4 + 4) + (4 + LOW)
    return elementwise("rotary", entries, each, each)


def _feed_forward(work: Workload, tokens: int, inner: int, entering: float) -> list[Op]:
    hidden, ways = work.shape.hidden, 2 if work.shape.gated else 1
    # Reads what it is of and writes one; backward reads that and one gradient and writes as many gradients. Unfused, a
    # gate is two kernels.
    apart = LOW * 2 * (ways - 1) * (not work.fused)
    activation = (LOW * (ways + 1) + apart, LOW * (2 * ways + 1) + 1.5 * apart)
    return [
        product("up", tokens, hidden, ways * inner, entering),
        elementwise("activation", tokens * inner, *activation, saved=LOW * ways),
        product("down", tokens, inner, hidden, LOW * tokens * inner),
    ]


def _experts(work: Workload) -> list[Op]:
    """Loads are taken as even. A rank has a part of the experts and of the tokens of all that share them."""
    experts, shape, layout = work.shape.experts, work.shape, work.layout
    assert experts is not None
    copies = work.row_tokens * experts.num_experts_per_tok
    local = max(1, experts.num_experts // layout.ep)
    inner, ends = -(-experts.moe_intermediate_size // layout.tp), copies * shape.hidden
    each = -(-copies // local)
    up = product("experts up", each, shape.hidden, 2 * inner)
    down = product("experts down", each, inner, shape.hidden)

    def all_of(op: Op, saved: float) -> Op:
        moved = (op.moved[0] * local, op.moved[1] * local)
        return op._replace(flops=op.flops * local, moved=moved, saved=saved)

    router = product("router", work.norm_tokens, shape.hidden, experts.num_experts, 4 * work.norm_tokens
                     * experts.num_experts)  # fmt: skip
    return [
        router,
        elementwise("expert permutation", ends, 4 * LOW, 4 * LOW),
        all_of(up, LOW * ends),
        elementwise("experts activation", copies * inner, 3 * LOW, 5 * LOW, saved=2 * LOW),
        all_of(down, LOW * copies * inner),
        elementwise("expert combination", ends, 2 * LOW, 3 * LOW, saved=LOW),
    ]


def head_ops(work: Workload) -> list[Op]:
    """The last norm, the head and the loss on one tensor rank: logits in bfloat16, probabilities in float32."""
    tokens, columns = work.row_tokens, -(-work.shape.vocab // work.layout.tp)
    ends, wide = work.norm_tokens * work.shape.hidden, work.state.residual
    # Cast (2 read, 4 written), maximum, sum and look-up; backward probabilities and their cast.
    traffic = (6, 6) if work.fused_loss else (14, 14)
    return [
        elementwise("last norm", ends, wide + LOW, 2 * wide + 3 * LOW, saved=wide),
        product("head", tokens, work.shape.hidden, columns, LOW * ends),
        elementwise("loss", tokens * columns, *traffic, saved=4),
    ]


def again(work: Workload, op: Op) -> float:
    """The share of an op that the backward pass computes again."""
    if work.recompute == "block":
        return 1.0
    if work.recompute == "selective":
        return float(op.name == "attention scores")
    if work.recompute == "alternate":
        return {"elementwise": 1.0, "products": 0.5 * op.linear, "attention": 0.0}[op.part]
    return 0.0


def kept(work: Workload, ops: Sequence[Op]) -> float:
    """Bytes that the ops of a layer leave for its backward pass, if it is one that computes again."""
    enters = float(work.state.residual * work.norm_tokens * work.shape.hidden)
    if work.recompute == "block":
        return enters
    if work.recompute == "alternate":
        attended = work.row_tokens * (LOW * work.shape.queries + 4 * work.shape.heads) / work.layout.tp
        return enters + attended + sum(LOW * op.sizes[2] / 2 for op in ops)
    return sum(op.saved * (1 - again(work, op)) for op in ops)
