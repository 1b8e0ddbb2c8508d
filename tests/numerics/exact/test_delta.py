"""The gated delta rule in exact numerics: right, and in the same bits however its tokens and heads are divided; and so
is a whole model with such layers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from equigrad.config.model import LinearAttention, Model
from equigrad.models.grids import grids
from equigrad.models.specs import parameter_specs
from equigrad.numerics.cache import DecodingCache
from equigrad.numerics.deferred import DeferredWeightGradients
from equigrad.numerics.exact import delta
from equigrad.numerics.exact.channels import Grids, Want
from equigrad.numerics.exact.fused import run_fused
from equigrad.numerics.exact.grids import ROUND, term_bits
from equigrad.numerics.exact.layers import LayerGrids
from equigrad.numerics.exact.ops import ExactOps
from equigrad.numerics.row import Row
from equigrad.parallel.collectives import Axis
from equigrad.parallel.placement import whole
from tests.jobs import tiny_job, train
from tests.numerics.test_delta import Shape, inputs, layer_of, reference
from tests.workers import Workers

# Key heads, value heads to each, widths of keys and values, kernel.
SHAPES = [(2, 2, 8, 6, 4), (3, 1, 4, 8, 1), (1, 3, 5, 7, 2)]
LENGTHS = [(1,), (5, 1, 64, 65, 130), (2, 63, 1, 200, 7, 7), (129,), ()]
NAMES = [*(f"linear_attn.{which}_conv1d.weight" for which in "qkv"), "linear_attn.A_log", "linear_attn.dt_bias"]
MOST = 1000
"""Tokens of a step."""

ops = ExactOps(torch.float32, 0, MOST, term_bits(MOST))


def values(tokens: int, shape: Shape, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Features and rates of a value type, weights float64."""
    return [x.detach().to(dtype if n < 2 else torch.float64) for n, x in enumerate(inputs(tokens, shape))]


def alone(_: Tensor) -> None:
    """One rank has the largest value already."""


def gradients(
    shape: Shape, row: Row, given: Sequence[Tensor], dout: Tensor, over_ranks: Callable[[Tensor], None] = alone
) -> list[Tensor]:
    """The output and the gradients of all that is given, after a step that calibrates the grids."""
    layer, found = layer_of(shape), list[Tensor]()
    channels = Grids({n: Want(len(w), term_bits(MOST), (0, len(w))) for n, w in zip(NAMES, given[2:], strict=True)})
    layer.grids = {name: LayerGrids((), {"sum": channels[name]}) for name in NAMES}
    kept = False
    while not kept:
        own = [x.clone().requires_grad_() for x in given]
        out = ops.gated_delta_rule(own[0], own[1], own[2:5], own[5], own[6], layer, row)
        found = [out.detach(), *torch.autograd.grad(out, own, dout)]
        kept = channels.end_step(over_ranks)
    return found


def drawn(like: Tensor, tokens: int) -> Tensor:
    """Gradients of the output for so many tokens."""
    return torch.randn(tokens, *like.shape[1:], generator=torch.Generator().manual_seed(9)).to(like.dtype)


def output_gradient(tokens: int, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    return drawn(torch.empty(0, shape[0] * shape[1], shape[3], dtype=dtype), tokens)


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Bits, of which zero has a sign."""
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
        assert torch.equal(a.signbit(), b.signbit())


@pytest.fixture
def compiled() -> Iterator[None]:
    run_fused("compiled")
    yield
    run_fused("plain")


@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 100])
def test_a_tree_is_a_sum_in_an_order_of_its_own(width: int) -> None:
    x = torch.randn(5, width, 3, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    found = delta.tree_sum(x, 1)
    torch.testing.assert_close(found, x.sum(1), rtol=0, atol=1e-13)
    assert torch.equal(delta.tree_sum(x.mT.contiguous(), -1), found)
    assert torch.equal(delta.tree_sum(x[2:3], 1), found[2:3])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_rule_matches_the_recurrence_in_float64(lengths: tuple[int, ...], shape: Shape) -> None:
    row = Row.of(lengths)
    given, dout = values(row.tokens, shape, torch.float64), output_gradient(row.tokens, shape, torch.float64)
    out, *found = gradients(shape, row, given, dout)
    if not lengths:
        assert out.shape == (0, shape[0] * shape[1], shape[3])
        assert not any(x.any() for x in found)
        return
    own = [x.clone().requires_grad_() for x in given]
    expected = reference(shape, lengths, *own)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    for number, (mine, theirs) in enumerate(zip(found, torch.autograd.grad(expected, own, dout), strict=True)):
        # Sums over tokens are of rounded terms.
        tolerance = 1e-13 if number < 2 else 1e-7
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance * max(1.0, float(theirs.abs().max())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_the_packing(shape: Shape, dtype: torch.dtype) -> None:
    """Segments in one row, in another order, and in rows of their own."""
    lengths = (5, 1, 64, 65, 130, 7, 7)
    given, dout = values(sum(lengths), shape, dtype), output_gradient(sum(lengths), shape, dtype)
    expected = gradients(shape, Row.of(lengths), given, dout)
    parts = [x.split(lengths) for x in (*given[:2], dout, *expected[:3])]
    for order in ([3, 0, 6, 2, 5, 1, 4], [4], [1, 6]):
        x, rates, d, *wanted = (torch.cat([part[n] for n in order]) for part in parts)
        found = gradients(shape, Row.of([lengths[n] for n in order]), [x, rates, *given[2:]], d)
        assert_equal(found[:3], wanted)
        if len(order) == len(lengths):
            assert_equal(found[3:], expected[3:])


@pytest.mark.parametrize("budget", [1, 100_000])
def test_bits_do_not_depend_on_what_is_computed_at_a_time(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """Few heads, and few segments."""
    shape, lengths = (3, 2, 4, 4, 4), (130, 1, 64, 9, 9, 70)
    given, dout = values(sum(lengths), shape), output_gradient(sum(lengths), shape)
    expected = gradients(shape, Row.of(lengths), given, dout)
    monkeypatch.setattr(delta, "WORKING_BYTES", budget)
    assert_equal(gradients(shape, Row.of(lengths), given, dout), expected)


def test_bits_do_not_depend_on_the_place_of_a_head() -> None:
    shape, row, order = (4, 2, 4, 6, 3), Row.of([70, 9]), torch.tensor([2, 0, 3, 1])
    given, dout = values(row.tokens, shape), output_gradient(row.tokens, shape)
    expected = gradients(shape, row, given, dout)

    def moved(x: Tensor, dim: int) -> Tensor:
        return x.unflatten(dim, (4, -1)).index_select(dim, order).flatten(dim, dim + 1)

    dims = [1, 1, 0, 0, 0, 0, 0]
    found = gradients(shape, row, [moved(x, dim) for x, dim in zip(given, dims, strict=True)], moved(dout, 1))
    assert_equal(found, [moved(x, dim) for x, dim in zip(expected, [1, *dims], strict=True)])


def test_bits_do_not_depend_on_threads() -> None:
    shape, row = (4, 2, 32, 32, 4), Row.of([100, 65, 65, 64, 64])  # states large enough to be divided
    given, dout = values(row.tokens, shape), output_gradient(row.tokens, shape)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(gradients(shape, row, given, dout))
    finally:
        torch.set_num_threads(before)
    assert_equal(*found)


@pytest.mark.timeout(600)  # a dozen functions to compile
def test_compiled_bits_are_plain_bits(request: pytest.FixtureRequest) -> None:
    # Two segments all the way: functions are compiled once more for one.
    shape, lengths = (2, 2, 4, 6, 3), (66, 66)
    given, dout = values(sum(lengths), shape), output_gradient(sum(lengths), shape)
    expected = gradients(shape, Row.of(lengths), given, dout)
    decoded = _decoded(shape, lengths, 1)
    request.getfixturevalue("compiled")
    assert_equal(gradients(shape, Row.of(lengths), given, dout), expected)
    assert_equal(_decoded(shape, lengths, 1), decoded)


def _decoded(shape: Shape, lengths: tuple[int, ...], new: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What ``new`` tokens of each segment give, and before them those of the prompts, one after another; some segments
    end early, and the others change places."""
    whole, count = tuple(n + new for n in lengths), len(lengths)
    given, layer = values(sum(whole), shape, dtype), layer_of(shape)
    ends = torch.tensor(whole).cumsum(0)
    cache = DecodingCache(count, max(whole), 1, 8, dtype, torch.device("cpu"))
    at = torch.cat([torch.arange(e - n, e - new) for e, n in zip(ends.tolist(), whole, strict=True)])
    row, kept, found = cache.prefill(list(lengths)), torch.arange(count), list[Tensor]()
    with torch.no_grad():
        for left in range(new, -1, -1):
            if left < new:
                at, row = ends[kept] - left - 1, cache.step()
            out = ops.gated_delta_rule(given[0][at], given[1][at], given[2:5], given[5], given[6], layer, row)
            found += [at, out]
            if left == 1 < new:
                kept = torch.tensor(cache.drop([0]))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_has_the_bits_of_the_whole_row(shape: Shape, dtype: torch.dtype) -> None:
    lengths, new = (5, 1, 64, 67, 2), 5
    whole = tuple(n + new for n in lengths)
    given = values(sum(whole), shape, dtype)
    expected, *_ = gradients(shape, Row.of(whole), given, output_gradient(sum(whole), shape, dtype))
    found = _decoded(shape, lengths, new, dtype)
    for at, out in zip(found[::2], found[1::2], strict=True):
        assert_equal([out], [expected[at]])


@pytest.mark.parametrize("rate", [-12.0, 3.0, 30.0])
def test_states_that_fade_at_once_or_never_have_finite_gradients(rate: float) -> None:
    given, row = values(150, SHAPES[0]), Row.of([150])
    given[5].fill_(rate)
    assert all(x.isfinite().all() for x in gradients(SHAPES[0], row, given, output_gradient(150, SHAPES[0])))


def test_a_segment_that_is_not_finite_leaves_the_others_alone() -> None:
    shape, lengths = SHAPES[0], (5, 70, 3)
    given, dout = values(78, shape), output_gradient(78, shape)
    expected = [x.split(lengths) for x in gradients(shape, Row.of(lengths), given, dout)[:3]]
    given[0][10:12] = torch.inf
    layer, own = layer_of(shape), [x.requires_grad_() for x in given[:2]]
    out = ops.gated_delta_rule(*own, given[2:5], given[5], given[6], layer, Row.of(lengths))
    found = [x.split(lengths) for x in (out.detach(), *torch.autograd.grad(out, own, dout))]
    for mine, theirs in zip(found, expected, strict=True):
        assert not mine[1].isfinite().all()
        assert_equal(mine[::2], theirs[::2])


def test_weights_can_have_their_gradients_later() -> None:
    shape, row, found = SHAPES[0], Row.of([3, 67]), []
    for later in (False, True):
        given, layer = [x.requires_grad_() for x in values(70, shape)], layer_of(shape)
        channels = Grids({n: Want(len(w), 30, (0, len(w))) for n, w in zip(NAMES, given[2:], strict=True)})
        layer.grids = {name: LayerGrids((), {"sum": channels[name]}) for name in NAMES}
        with DeferredWeightGradients() if later else nullcontext() as deferred:
            ops.gated_delta_rule(given[0], given[1], given[2:5], given[5], given[6], layer, row).sum().backward()
        if later:
            assert all(x.grad is None for x in given[2:])
            deferred.run()
        found.append([x.grad for x in given])
    assert_equal(*found)


def test_a_norm_of_value_heads_has_room_for_all_of_them() -> None:
    """Its gradient has as many terms to a token."""
    linear = LinearAttention(linear_num_key_heads=2, linear_num_value_heads=32)
    config = Model(hidden_size=8, num_attention_heads=2, num_key_value_heads=2, linear_attention=linear,
                   vocab_size=9, intermediate_size=8, num_hidden_layers=2)  # fmt: skip
    specs = parameter_specs(config)
    places = {name: whole(name, spec.shape) for name, spec in specs.items()}
    found = grids(config, specs, places, 1000, torch.device("cpu"))
    norm = found["model.layers.0.linear_attn.norm.weight/sum"]
    norm.round(torch.ones(1, len(norm.large), dtype=torch.float64))
    assert not found.end_step(alone)
    assert (32_000 * 2.0 ** int(found.limit().max()) <= 2**53 * norm.large / ROUND).all()


# On ranks.


def _largest(x: Tensor) -> None:
    dist.all_reduce(x, dist.ReduceOp.MAX)


def _wrong_ranks(strategy: Any, zigzag: bool) -> list[Any]:
    """What differs from the bits of one process, on this rank of a context axis."""
    wrong = []
    axis = Axis(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    for shape in ((2, 2, 4, 6, 4), (1, 3, 8, 4, 3), (5, 1, 4, 4, 1)):
        for lengths in ((9,), (1,), (), (3, 10, 17), (130, 1, 64), (1, 0, 200)):
            row, alone_row = Row.of(lengths, context=axis, zigzag=zigzag, strategy=strategy), Row.of(lengths)
            assert row.context is not None
            given, dout = values(row.tokens, shape), output_gradient(row.tokens, shape)
            expected = gradients(shape, alone_row, given, dout)
            take = row.context.take
            found = gradients(shape, row, [*map(take, given[:2]), *given[2:]], take(dout), _largest)
            for x in found[3:]:
                dist.all_reduce(x)
            wanted = [*map(take, expected[:3]), *expected[3:]]
            pairs = enumerate(zip(found, wanted, strict=True))
            wrong += [(shape, lengths, number) for number, (a, b) in pairs if not torch.equal(a, b)]
    return wrong


@pytest.mark.parametrize(("strategy", "zigzag"), [("ring", True), ("ulysses", False)])
def test_context_ranks_have_the_bits_of_one(workers: Callable[[int], Workers], strategy: str, zigzag: bool) -> None:
    """Heads that ranks do not divide evenly, or fewer than ranks."""
    assert workers(2).run(_wrong_ranks, strategy, zigzag) == [[]] * 2


NEXT: dict[str, Any] = {
    "numerics__kind": "exact", "train__steps": 3, "model__num_hidden_layers": 3, "model__initializer_range": 0.05,
    "model__qk_norm": True, "model__attn_output_gate": True, "model__zero_centred_norm": True,
    "model__partial_rotary_factor": 0.5,
    "model__linear_attention": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 6,
        "full_attention_interval": 2,
    },
}  # fmt: skip


def _trained(folder: Path, changes: dict[str, Any]) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Losses and gradient norms of three steps, and the parameters after them."""
    records, parameters = train(tiny_job(**NEXT | changes), folder)
    return [(record["loss"], record["grad_norm"]) for record in records], parameters


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    return _trained(tmp_path_factory.mktemp("one"), {})


def test_a_model_has_the_same_bits_in_rows_of_another_size(one_process: Any, tmp_path: Path) -> None:
    for row_tokens in (48, 500):
        steps, parameters = _trained(tmp_path / str(row_tokens), {"batch__row_tokens": row_tokens})
        assert steps == one_process[0]
        assert all(torch.equal(x, one_process[1][name]) for name, x in parameters.items())


@pytest.mark.parametrize(
    "layout", [{"dp_shard": 2}, {"dp_replicate": 2}, {"cp": 2}, {"cp": 2, "cp_strategy": "ulysses"}, {"tp": 2},
               {"pp": 2, "pp_schedule": "zero_bubble"}], ids=str
)  # fmt: skip
def test_a_model_has_the_same_bits_on_two_ranks(
    workers: Callable[[int], Workers], one_process: Any, tmp_path: Path, layout: dict[str, Any]
) -> None:
    changes = {f"layout__{key}": value for key, value in layout.items()}
    for steps, parameters in workers(2).run(_trained, tmp_path, changes):
        assert steps == one_process[0]
        assert all(torch.equal(x, one_process[1][name]) for name, x in parameters.items())
