"""Every optimizer rule against its formulas, written once more: numpy in float64, one parameter at a time.

The transcription knows nothing of the package but the values of ``Optim``, and shares no code with it.
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from equigrad.config.optim import Optim
from equigrad.models.specs import Role, Spec
from equigrad.optim import arithmetic as pieces
from equigrad.optim.arithmetic import Arithmetic, Native
from equigrad.optim.exact import Exact
from equigrad.optim.newton_schulz import polynomials
from equigrad.optim.optimizer import Optimizer
from equigrad.parallel.collectives import ALONE
from equigrad.parallel.placement import place_all

Array = npt.NDArray[np.float64]

SHAPES: dict[str, tuple[tuple[int, ...], Role]] = {
    "tall": ((7, 5), "matrix"),
    "wide": ((5, 7), "matrix"),
    "row": ((1, 9), "matrix"),
    "column": ((9, 1), "matrix"),
    "square": ((6, 6), "matrix"),
    "experts": ((3, 5, 4), "experts"),
    "embedding": ((11, 6), "embedding"),
    "head": ((11, 6), "head"),
    "norm": ((5,), "vector"),
    "biases": ((3, 5), "vector"),
    "kernel": ((6, 1, 4), "matrix"),
}
RULES = {
    "adamw": Optim(name="adamw", betas=(0.8, 0.9), eps=1e-6),
    "lion": Optim(name="lion"),
    "lion-betas": Optim(name="lion", lion_betas=(0.7, 0.6), weight_decay=0.3),
    "muon": Optim(name="muon"),
    "muon-plain-momentum": Optim(name="muon", nesterov=False, momentum=0.8, weight_decay=0.0),
    "muon-spectral": Optim(name="muon", update_scale="spectral", betas=(0.7, 0.8), eps=1e-4),
    "muon-polar-express": Optim(name="muon", newton_schulz="polar_express"),
    "muon-three-times": Optim(name="muon", newton_schulz_steps=3),
    "muon-polar-express-eight-times": Optim(name="muon", newton_schulz="polar_express", newton_schulz_steps=8),
    "normuon": Optim(name="normuon"),
    "normuon-spectral": Optim(name="normuon", row_beta=0.5, update_scale="spectral", nesterov=False),
    "lionmuon": Optim(name="lionmuon"),
    "lionmuon-every-fifth": Optim(name="lionmuon", period=5, update_scale="spectral"),
    "lionmuon-own-rate": Optim(name="lionmuon", period=3, lion_lr=0.5, lion_betas=(0.8, 0.6)),
    "lionmuon-every-step": Optim(name="lionmuon", period=1),
    "signmuon": Optim(name="signmuon"),
    "signmuon-every-seventh": Optim(name="signmuon", period=7, momentum=0.7),
    "meqmuon": Optim(name="meqmuon"),
    "meqmuon-polar-express": Optim(name="meqmuon", newton_schulz="polar_express", meq_scale=0.3, momentum=0.7),
}
RATES = {"embedding_lr": 0.5, "head_lr": 1.5, "vector_lr": 0.25}
CONFIGS = {name: config.model_copy(update=RATES) for name, config in RULES.items()}
ONE_OF_EACH = ["adamw", "lion", "muon", "muon-polar-express", "normuon", "lionmuon", "signmuon", "meqmuon"]

# What the polynomials do to singular values; "polar_express" repeats its last.
QUINTIC = [(3.4445, -4.7750, 2.0315)]
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def coefficients(config: Optim) -> list[tuple[float, float, float]]:
    listed = QUINTIC if config.newton_schulz == "quintic" else POLAR_EXPRESS
    return [listed[min(step, len(listed) - 1)] for step in range(config.newton_schulz_steps)]


def newton_schulz(x: Array, config: Optim) -> Array:
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T, config).T
    larger = 1.02 if config.newton_schulz == "polar_express" else 1.0
    x = x / max(larger * math.sqrt((x * x).sum()), 1e-7)
    for a, b, c in coefficients(config):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


def rms(x: Array, axis: int | tuple[int, ...] | None) -> Array:
    return np.sqrt((x * x).mean(axis, keepdims=True))


def variation(sizes: Array) -> float:
    counted = sizes[sizes > 1e-7]
    return float(counted.std() / counted.mean()) if counted.size else 0.0


def equalized(x: Array) -> Array:
    by_row, by_column = rms(x, 1), rms(x, 0)
    return x / np.maximum(by_row if variation(by_row) > variation(by_column) else by_column, 1e-7)


def of_each(work: Callable[[Array], Array], x: Array) -> Array:
    return work(x) if x.ndim == 2 else np.stack([work(matrix) for matrix in x])


class Transcribed:
    """One parameter and its state. A rule tells what part of the learning rate it takes, and the update."""

    def __init__(self, config: Optim, role: Role, value: Array) -> None:
        self.config, self.role, self.value = config, role, value
        self.hidden = role == "experts" or (role == "matrix" and value.ndim == 2)
        self.first, self.second, self.rows = np.zeros_like(value), np.zeros_like(value), np.zeros(value.shape[:-1])

    def step(self, g: Array, lr: float, t: int) -> None:
        config = self.config
        part, update = getattr(self, config.name)(g, t)
        of_role = {"embedding": config.embedding_lr, "head": config.head_lr, "vector": config.vector_lr}
        eta = lr * part * of_role.get(self.role, 1.0)
        decay = 0.0 if self.role == "vector" else config.weight_decay
        self.value = (1 - eta * decay) * self.value - eta * update

    def adamw(self, g: Array, t: int) -> tuple[float, Array]:
        b1, b2 = self.config.betas
        self.first = b1 * self.first + (1 - b1) * g
        self.second = b2 * self.second + (1 - b2) * g * g
        first, second = self.first / (1 - b1 ** (t + 1)), self.second / (1 - b2 ** (t + 1))
        return 1.0, first / (np.sqrt(second) + self.config.eps)

    def mixture(self, g: Array, b1: float, b2: float) -> Array:
        u = b1 * self.first + (1 - b1) * g
        self.first = b2 * self.first + (1 - b2) * g
        return u

    def lion(self, g: Array, t: int) -> tuple[float, Array]:
        return 1.0, np.sign(self.mixture(g, *self.config.lion_betas))

    def lionmuon(self, g: Array, t: int) -> tuple[float, Array]:
        config = self.config
        if not self.hidden:
            return self.adamw(g, t)
        u = self.mixture(g, *(config.lion_betas if config.name == "lionmuon" else [config.momentum] * 2))
        if t % config.period == 0:
            return 1.0, self.scale() * self.orthogonal(u)
        return config.lion_lr or (1 / 20 if config.period < 5 else 1 / 40), np.sign(u)

    signmuon = lionmuon

    def muon(self, g: Array, t: int) -> tuple[float, Array]:
        return (1.0, self.scale() * self.orthogonal(self.ahead(g))) if self.hidden else self.adamw(g, t)

    def normuon(self, g: Array, t: int) -> tuple[float, Array]:
        if not self.hidden:
            return self.adamw(g, t)
        u, beta = self.orthogonal(self.ahead(g)), self.config.row_beta
        self.rows = beta * self.rows + (1 - beta) * (u * u).mean(-1)
        even = u / (np.sqrt(self.rows) + 1e-10)[..., None]
        before, after = (np.sqrt((x * x).sum((-2, -1), keepdims=True)) for x in (u, even))
        return 1.0, self.scale() * even * before / (after + 1e-10)

    def meqmuon(self, g: Array, t: int) -> tuple[float, Array]:
        self.first = self.config.momentum * self.first + g
        if self.hidden:
            made = of_each(equalized, self.orthogonal(self.first))
        elif self.role in ("embedding", "head"):
            made = self.first / np.maximum(rms(self.first, 1), 1e-7)
            made = made / np.maximum(rms(made, 0), 1e-7)
        else:
            made = self.first / np.maximum(rms(self.first, None if g.ndim == 1 else tuple(range(1, g.ndim))), 1e-7)
        return 1.0, self.config.meq_scale * made

    def ahead(self, g: Array) -> Array:
        self.first = self.config.momentum * self.first + g
        return g + self.config.momentum * self.first if self.config.nesterov else self.first

    def orthogonal(self, u: Array) -> Array:
        return of_each(lambda matrix: newton_schulz(matrix, self.config), u)

    def scale(self) -> float:
        m, n = self.value.shape[-2:]
        return 0.2 * math.sqrt(max(m, n)) if self.config.update_scale == "rms" else math.sqrt(m / n)


Gradient = Callable[[np.random.Generator, tuple[int, ...], int], Array]


def usual(of: np.random.Generator, shape: tuple[int, ...], step: int) -> Array:
    return of.standard_normal(shape)


def without_some_rows(of: np.random.Generator, shape: tuple[int, ...], step: int) -> Array:
    """The first of the first dimension, and one row of each matrix that has several."""
    x = of.standard_normal(shape)
    x[0] = 0.0
    if len(shape) > 1 and shape[-2] > 1:
        x[..., 1, :] = 0.0
    return x


def of_rank_one(of: np.random.Generator, shape: tuple[int, ...], step: int) -> Array:
    """One matrix of small integers, more or less of it each step: of rank 1 in float32 too."""
    left, right = np.arange(math.prod(shape[:-1])) % 5 - 1.0, np.arange(shape[-1]) * 2 % 5 + 1.0
    return np.outer(left, right).reshape(shape) * (1 + of.integers(1024)) / 1024


def scales(shape: tuple[int, ...]) -> Array:
    """Every other row is a millionth of the others, as of tokens that were not seen for long."""
    rows = np.where(np.arange(shape[0]) % 2, 2.0**-20, 1.0)
    return rows.reshape(-1, *[1] * (len(shape) - 1))


GRADIENTS: dict[str, Gradient] = {
    "usual": usual,
    "zero": lambda of, shape, step: np.zeros(shape),
    "without-rows": without_some_rows,
    "with-a-pause": lambda of, shape, step: usual(of, shape, step) * (step not in (3, 4, 5)),
    "vanishing": lambda of, shape, step: usual(of, shape, step) * 1e-9,
    "rank-one": of_rank_one,
    "uneven-rows": lambda of, shape, step: usual(of, shape, step) * scales(shape),
}


class Step(NamedTuple):
    """What a step did to a parameter: ``off``, by how much otherwise than the transcription; all are norms."""

    what: str
    off: float
    moved: float
    size: float


def followed(config: Optim, arithmetic: Arithmetic, dtype: torch.dtype, steps: int) -> Iterator[Step]:
    """Every parameter and gradient is what float32 has too; learning rates go up and down."""
    random, names = np.random.default_rng(0), [f"{kind}.{shape}" for kind in GRADIENTS for shape in SHAPES]
    shapes = {name: SHAPES[name.split(".")[1]] for name in names}
    values = {name: shortened(0.1 * random.standard_normal(shapes[name][0])) for name in names}
    theirs = {name: Transcribed(config, shapes[name][1], values[name]) for name in names}
    ours = place_all((name, torch.tensor(value, dtype=dtype)) for name, value in values.items())
    optimizer = Optimizer(config, ours, {name: Spec(*shapes[name]) for name in names}, arithmetic)
    for step in range(steps):
        lr = 0.5 / (1 + step % 4)
        before = {name: placed.tensor.double().numpy().copy() for name, placed in ours.items()}
        gradients = {n: shortened(GRADIENTS[n.split(".")[0]](random, shapes[n][0], step)) for n in names}
        optimizer.step(place_all((n, torch.tensor(g, dtype=dtype)) for n, g in gradients.items()), lr)
        for name, parameter in theirs.items():
            moved = -parameter.value
            parameter.step(gradients[name], lr, step)
            moved += parameter.value
            off = ours[name].tensor.double().numpy() - before[name] - moved
            norms = (float(np.linalg.norm(x)) for x in (off, moved, parameter.value))
            yield Step(f"{name}, step {step}", *norms)


def shortened(x: Array) -> Array:
    return x.astype(np.float32).astype(np.float64)


def allowed(step: Step, config: Optim, close: float, parameter: torch.dtype, buffer: torch.dtype) -> float:
    """``close``, relative to the update, and that a parameter is rounded when it decays and when it is updated; nothing
    at all where nothing should happen.

    Where buffers have rank 1 their rounding has not, and Newton-Schulz takes any matrix of that size for one: a
    singular value near 0 grows by the product of all first coefficients, 485 for Muon's five times, 989 for Polar
    Express, 12 785 where its last is used four times. So updates there differ by about that many roundings, however
    they are computed. Elsewhere no case comes near: rows of zeros are zeros in every product.
    """
    if not step.moved:
        return 0.0
    if step.what.startswith("rank-one"):
        close = max(close, 4 * torch.finfo(buffer).eps * math.prod(a for a, _, _ in coefficients(config)))
    return close * step.moved + torch.finfo(parameter).eps * step.size


def violations(
    config: Optim, arithmetic: Arithmetic, close: float, parameter: torch.dtype = torch.float64, steps: int = 10
) -> list[Step]:
    done, buffer = list(followed(config, arithmetic, parameter, steps)), arithmetic.moment_dtype or parameter
    assert len(done) == steps * len(SHAPES) * len(GRADIENTS)
    return [step for step in done if not step.off <= allowed(step, config, close, parameter, buffer)]


@pytest.mark.parametrize("rule", CONFIGS)
def test_in_float64_every_step_of_every_rule_is_that_of_its_formulas(rule: str) -> None:
    assert violations(CONFIGS[rule], Native(ALONE.add), 1e-12) == []


@pytest.mark.parametrize("rule", ONE_OF_EACH)
def test_in_float32_every_step_is_that_of_float64_to_four_digits(rule: str) -> None:
    assert violations(CONFIGS[rule], Native(ALONE.add), 1e-4, torch.float32, steps=5) == []


@pytest.mark.parametrize("rule", ONE_OF_EACH)
def test_in_exact_numerics_every_step_is_that_of_the_formulas_to_five_digits(rule: str) -> None:
    assert violations(CONFIGS[rule], Exact(ALONE.add, ALONE.largest), 1e-5, steps=5) == []


@pytest.mark.parametrize("arithmetic", [Native(ALONE.add), Exact(ALONE.add, ALONE.largest)], ids=["native", "exact"])
@pytest.mark.parametrize("rule", ["adamw", "muon", "meqmuon"])
def test_however_small_the_pieces_an_update_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, rule: str, arithmetic: Arithmetic
) -> None:
    found = []
    for entries in (1 << 20, 16):
        monkeypatch.setattr(pieces, "PIECE_ENTRIES", entries)
        random, specs = torch.Generator().manual_seed(0), {name: Spec(*shape) for name, shape in SHAPES.items()}
        ours, *gradients = (
            place_all((n, torch.randn(s.shape, generator=random, dtype=torch.float64)) for n, s in specs.items())
            for _ in range(4)
        )
        optimizer = Optimizer(CONFIGS[rule], ours, specs, arithmetic)
        for gradient in gradients:
            optimizer.step(gradient, 0.1)
        found.append(ours | optimizer.state())
    for name, placed in found[0].items():
        assert torch.equal(placed.tensor, found[1][name].tensor), name


@pytest.mark.parametrize("role", ["matrix", "vector"])
@pytest.mark.parametrize("rule", CONFIGS)
def test_without_a_gradient_matrices_decay_and_vectors_stay_to_the_bit(rule: str, role: Role) -> None:
    value = torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3)
    ours = place_all([("w", value.clone())])
    config = CONFIGS[rule].model_copy(update={"period": 1})  # signs have a learning rate of their own
    optimizer, kept = Optimizer(config, ours, {"w": Spec((4, 3), role)}, Native(ALONE.add)), 1.0
    for lr in (0.5, 0.0, 0.25):
        optimizer.step(place_all([("w", torch.zeros_like(value))]), lr)
        kept *= 1 - lr * config.weight_decay if role == "matrix" else 1.0
    np.testing.assert_allclose(ours["w"].tensor, value * kept, rtol=0 if role == "vector" else 1e-15)


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8)])
@pytest.mark.parametrize("polynomials", ["quintic", "polar_express"])
@pytest.mark.parametrize("arithmetic", [Native(ALONE.add), Exact(ALONE.add, ALONE.largest)], ids=["native", "exact"])
def test_orthogonalised_matrices_keep_their_singular_vectors_and_have_values_near_one(
    arithmetic: Arithmetic, polynomials: Literal["quintic", "polar_express"], shape: tuple[int, int]
) -> None:
    random = torch.Generator().manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(5, *shape, generator=random, dtype=torch.float64), full_matrices=False)
    values = torch.rand(5, 1, min(shape), generator=random, dtype=torch.float64) * 9.5 + 0.5
    dtype = arithmetic.moment_dtype or torch.float64
    made = arithmetic.orthogonalize((u * values @ vh).to(dtype), Optim(newton_schulz=polynomials)).double()
    found = torch.linalg.svd(made, full_matrices=False)
    assert found.S.min() > 0.6
    assert found.S.max() < 1.3
    close = 1e-12 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(found.U @ found.Vh, u @ vh, rtol=0, atol=close)


def test_polar_express_repeats_its_last_polynomial_which_has_a_stable_fixed_point() -> None:
    """Singular values, of which it makes a x + b x^3 + c x^5: to where a + b x^2 + c x^4 is 1, and not away."""
    applied, _ = polynomials(Optim(newton_schulz="polar_express", newton_schulz_steps=10))
    five, _ = polynomials(Optim(newton_schulz="polar_express", newton_schulz_steps=5))
    assert applied == (*five, *five[-1:] * 5)
    a, b, c = five[-1]
    fixed = math.sqrt((-b - math.sqrt(b * b - 4 * c * (a - 1))) / (2 * c))
    assert fixed == pytest.approx(1.035, abs=5e-4)
    assert abs(a + 3 * b * fixed**2 + 5 * c * fixed**4) < 1
    values = np.geomspace(1e-2, 1, 1000) / 1.02
    for number, (a, b, c) in enumerate((*applied, *applied[-1:] * 90), 1):
        values = a * values + b * values**3 + c * values**5
        if number == 10:
            assert np.abs(values - fixed).max() < 0.03
    np.testing.assert_allclose(values, fixed, rtol=1e-6)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("scale", "theirs", "shape"),
    [("rms", "match_rms_adamw", (24, 40)), ("rms", "match_rms_adamw", (40, 24)), ("spectral", "original", (40, 24))],
)
def test_muon_matches_pytorch_as_closely_as_its_bfloat16_goes(
    scale: Literal["rms", "spectral"], theirs: str, shape: tuple[int, int], nesterov: bool
) -> None:
    """Its buffer is a mean and ours a sum, which is the same to what has no size."""
    random = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(shape, generator=random))
    reference = torch.optim.Muon(
        [parameter], lr=0.1, weight_decay=0.3, momentum=0.9, nesterov=nesterov, adjust_lr_fn=theirs
    )
    config = Optim(name="muon", weight_decay=0.3, momentum=0.9, nesterov=nesterov, update_scale=scale)
    start = parameter.detach().clone()
    ours = place_all([("w", start.clone())])
    optimizer = Optimizer(config, ours, {"w": Spec(shape, "matrix")}, Native(ALONE.add))
    for _ in range(3):
        gradient = torch.randn(shape, generator=random)
        parameter.grad = gradient.clone()
        reference.step()
        optimizer.step(place_all([("w", gradient)]), 0.1)
    off, moved = ours["w"].tensor - parameter.detach(), parameter.detach() - start
    assert off.norm() < 0.01 * moved.norm()
