"""The random number generators a process draws from, as JSON: Python's, NumPy's legacy global one, PyTorch's.

Saved by each rank, so that a resumed run draws what the uninterrupted one would have drawn. Generators that are
passed around as objects are their owners' to save.
"""

import base64
import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """The states. Of CUDA's generators it is the current device's, the only one a rank draws from."""
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    state = {
        "python": {"version": version, "words": _text(np.array(words, "<u4")), "gauss": gauss},
        "numpy": {**numpy, "state": {"key": _text(numpy["state"]["key"]), "pos": int(numpy["state"]["pos"])}},
        "torch": _text(torch.get_rng_state().numpy()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _text(torch.cuda.get_rng_state().numpy())
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Makes the next draws those that followed ``rng_state()``. CUDA's part applies only where there is CUDA."""
    python, numpy = state["python"], state["numpy"]
    words = _array(python["words"], "<u4").tolist()
    random.setstate((python["version"], tuple(words), python["gauss"]))
    key = _array(numpy["state"]["key"], "<u4")
    np.random.set_state({**numpy, "state": {"key": key, "pos": numpy["state"]["pos"]}})
    torch.set_rng_state(torch.from_numpy(_array(state["torch"], "u1")))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(_array(state["cuda"], "u1")))


def _text(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def _array(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).copy()
