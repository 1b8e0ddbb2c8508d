"""Elementary functions against 200-bit arithmetic, and their bits against themselves under other conditions."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from equigrad.errors import UserError
from equigrad.numerics.exact import elementary

Function = Callable[[Tensor], Tensor]


def cosine(x: Tensor) -> Tensor:
    return elementary.cos_sin(x)[0]


def sine(x: Tensor) -> Tensor:
    return elementary.cos_sin(x)[1]


def spread(low: float, high: float, number: int = 4001) -> Tensor:
    """Numbers of every size between, with what is next to zero and to one. Made of products: they too are the same
    everywhere."""
    near = torch.from_numpy(np.random.default_rng(0).random(number)) * 2 - 1
    even = low + (high - low) * torch.arange(number, dtype=torch.float64) / (number - 1)
    return torch.cat([even, near, near * 2.0**-20, 1 + near * 2.0**-30]).clamp(low, high)


POSITIVE = (1 + spread(0.0, 1.0)) * elementary.power_of_two(torch.arange(4 * 4001) % 2001 - 1000)
FUNCTIONS: dict[str, tuple[Function, Callable[..., mpmath.mpf], Tensor, float]] = {
    "exp": (elementary.exp, mpmath.exp, spread(-690.0, 690.0), 0.0),
    "log": (elementary.log, mpmath.log, torch.cat([POSITIVE, 1 + spread(0.0, 1e-8)]), 3e-16),
    "sqrt": (elementary.sqrt, mpmath.sqrt, torch.cat([POSITIVE, torch.zeros(3)]), 0.0),
    "sigmoid": (elementary.sigmoid, lambda x: 1 / (1 + mpmath.exp(-x)), spread(-600.0, 600.0), 0.0),
    "softplus": (elementary.softplus, lambda x: mpmath.log1p(mpmath.exp(x)), spread(-30.0, 600.0), 3e-16),
    "cos": (cosine, mpmath.cos, spread(-1.6e7, 1.6e7), 3e-16),
    "sin": (sine, mpmath.sin, spread(-1.6e7, 1.6e7), 3e-16),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_are_below_1e_15(name: str) -> None:
    """Relative, or absolute where a result is near zero: two roundings of numbers about one."""
    function, right, x, absolute = FUNCTIONS[name]
    mpmath.mp.prec = 200
    for at, found in zip(x.tolist(), function(x).tolist(), strict=True):
        expected = right(mpmath.mpf(at))
        assert abs(found - expected) <= 1e-15 * abs(expected) + absolute, at


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_element_does_not_depend_on_its_place(name: str) -> None:
    """A vector's body and its tail, a strided view and a number alone."""
    function, _, x, _ = FUNCTIONS[name]
    whole = bits(function(x))
    for size in (1, 2, 3, 5, 7, 8, 9, 17):
        assert whole[:size] == bits(function(x[:size]))
        assert whole[-size:] == bits(function(x[-size:]))
    assert whole[::3] == bits(function(x[::3]))
    assert whole[:1001] == [bits(function(one))[0] for one in x[:1001].split(1)]


def bits(x: Tensor) -> list[int]:
    return x.contiguous().view(torch.int64).tolist()


def digest() -> str:
    found = hashlib.sha256()
    for function, _, x, _ in FUNCTIONS.values():
        found.update(function(x).numpy().tobytes())
    return found.hexdigest()


CAPABILITIES = ["DEFAULT", "AVX2", "AVX512"]
HERE = torch.backends.cpu.get_cpu_capability()


@pytest.mark.parametrize("capability", CAPABILITIES[: CAPABILITIES.index(HERE) + 1] if HERE in CAPABILITIES else [HERE])
def test_bits_do_not_depend_on_instructions(capability: str) -> None:
    """On the code paths that this processor has; it cannot run the others."""
    code = "import tests.numerics.exact.test_elementary as t; print(t.digest())"
    env = os.environ | {"ATEN_CPU_CAPABILITY": capability.lower()}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest()


def test_bits_do_not_depend_on_threads() -> None:
    before, expected = torch.get_num_threads(), digest()
    try:
        torch.set_num_threads(3)
        assert digest() == expected
    finally:
        torch.set_num_threads(before)


def test_compiled_bits_are_those_of_eager() -> None:
    def every(*inputs: Tensor) -> list[Tensor]:
        return [function(x) for (function, *_), x in zip(FUNCTIONS.values(), inputs, strict=True)]

    inputs = [x for _, _, x, _ in FUNCTIONS.values()]
    for found, expected in zip(torch.compile(every)(*inputs), every(*inputs), strict=True):
        assert bits(found) == bits(expected)


def test_exponents_and_powers_of_two_are_exact() -> None:
    n = torch.arange(-1022, 1024)
    assert elementary.power_of_two(n).tolist() == [2.0**k for k in n.tolist()]
    x = torch.tensor([1.0, 0.999, 2.0, -3.0, 1e-30, 2.0**-1022, 0.0, -0.0], dtype=torch.float64)
    assert elementary.exponent(x).tolist() == [1, 0, 2, 2, -99, -1021, -1022, -1022]
    endless = torch.tensor([torch.inf, torch.nan], dtype=torch.float64)
    assert elementary.exponent(endless).tolist() == [1025, 1025]


def test_what_is_out_of_range_does_not_overflow() -> None:
    x = torch.tensor([-1e308, -701.0, 701.0, 1e308, -torch.inf], dtype=torch.float64)
    assert torch.isfinite(elementary.exp(x)).all()
    assert elementary.sigmoid(x).tolist()[:2] == [elementary.sigmoid(x[:1]).item()] * 2
    with pytest.raises(ValueError, match="radians"):
        elementary.cos_sin(torch.tensor([2.0**25], dtype=torch.float64))


def test_a_process_that_flushes_subnormal_numbers_is_found_out() -> None:
    elementary.check_subnormals(torch.device("cpu"))
    assert torch.set_flush_denormal(True)
    try:
        with pytest.raises(UserError, match="flushes subnormal numbers"):
            elementary.check_subnormals(torch.device("cpu"))
    finally:
        torch.set_flush_denormal(False)
