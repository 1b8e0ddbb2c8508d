import json
import random

import numpy as np
import torch

from equigrad.checkpoint.rng import rng_state, set_rng_state


def draws() -> list:
    return [
        random.random(),
        random.gauss(0, 1),
        random.sample(range(100), 5),
        np.random.rand(3).tolist(),
        np.random.standard_normal(3).tolist(),
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
        torch.randperm(9).tolist(),
        *([torch.randn(5, device="cuda").tolist()] if torch.cuda.is_available() else []),
    ]


def test_draws_after_a_state_is_set_are_those_that_followed_it():
    draws()  # an odd number of Gaussians: a half-used pair is part of the state
    state = json.loads(json.dumps(rng_state()))
    expected = draws()
    assert draws() != expected
    set_rng_state(state)
    assert draws() == expected
    assert rng_state() != state


def test_a_state_survives_being_set_and_taken_again():
    state = rng_state()
    draws()
    set_rng_state(state)
    assert rng_state() == state
