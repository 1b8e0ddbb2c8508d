"""Initial values: a known generator, the same for every box of a tensor, close enough to normal."""

import hashlib

import torch

from equigrad.numerics.random import fill_normal, key, splitmix64


def test_splitmix64_gives_the_published_sequence() -> None:
    # First outputs for seed 1234567, from the reference implementation of Vigna.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    numbers = splitmix64(torch.arange(4), 1234567)
    assert [n % 2**64 for n in numbers.tolist()] == expected


def test_values_have_not_changed() -> None:
    # Weights of published seeds must stay what they were: this digest may never change.
    values = torch.empty(64, 3)
    fill_normal(values, 0.02, 7, "model.embed_tokens.weight", (64, 3), (0, 0))
    assert key(7, "a") != key(7, "b") != key(8, "b")
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] == "6e83c49f65142c08"


def test_any_box_of_a_tensor_holds_the_values_of_the_whole() -> None:
    whole = torch.empty(11, 7)
    fill_normal(whole, 1.0, 3, "w", (11, 7), (0, 0))
    for rows, columns in [(slice(2, 5), slice(0, 7)), (slice(0, 11), slice(3, 4)), (slice(10, 11), slice(6, 7))]:
        box = torch.empty(rows.stop - rows.start, columns.stop - columns.start)
        fill_normal(box, 1.0, 3, "w", (11, 7), (rows.start, columns.start))
        assert torch.equal(box, whole[rows, columns])
    fill_normal(torch.empty(0, 7), 1.0, 3, "w", (11, 7), (0, 0))


def test_moments_are_those_of_a_normal_distribution() -> None:
    values = torch.empty(1 << 20, dtype=torch.float64)
    fill_normal(values, 1.0, 0, "w", (1 << 20,), (0,))
    assert abs(values.mean()) < 4e-3
    assert abs(values.var() - 1) < 6e-3
    assert abs((values**3).mean()) < 1.5e-2
    assert abs((values**4).mean() - 2.9) < 3e-2  # twelve uniforms: excess kurtosis -0.1
    assert values.abs().max() < 6
