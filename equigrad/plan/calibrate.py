"""Fits the calibrated constants by least squares: ``python -m equigrad.plan.calibrate`` writes ``calibration.json``.

The sum over calibration runs of the square of log(predicted / measured seconds) is made small by Levenberg-Marquardt,
over logits of shares. Four numbers, and one for each architecture.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from equigrad.files import write_json
from equigrad.plan.calibration import FILE, Calibration
from equigrad.plan.hardware import Constant, hardware
from equigrad.plan.published import Run, runs
from equigrad.plan.step import step

Vector = NDArray[np.float64]

SHARES = {"product": 0.9, "link": 0.75, "half_head": 0.8}
OPERANDS, FLASH = 1.5, 0.3
"""Where the search starts; the result does not depend on it."""


def fit(chosen: Sequence[Run], source: str, rounds: int = 40) -> Calibration:
    """The constants that fit these runs best. ``source`` says in each constant where it is from."""
    architectures = sorted({_architecture(run) for run in chosen})
    at = np.array([math.log(OPERANDS), *map(_logit, SHARES.values()), *[_logit(FLASH)] * len(architectures)])

    def errors(point: Vector) -> Vector:
        fitted = _calibration(point, architectures, source)
        return np.array([math.log(step(run.work, run.machine, fitted).seconds / run.seconds) for run in chosen])

    now, damping = errors(at), 1e-2
    for _ in range(rounds):
        moved = [errors(at + 1e-4 * unit) for unit in np.eye(len(at))]
        slope = np.stack([(after - now) / 1e-4 for after in moved], axis=1)
        normal = slope.T @ slope
        # Nothing in the data may hold a constant; then it stays where it is.
        change = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -slope.T @ now)
        after = errors(at + np.clip(change, -1, 1))
        if after @ after < now @ now:
            gain = 1 - (after @ after) / (now @ now)
            at, now, damping = at + np.clip(change, -1, 1), after, damping / 5
            if gain < 1e-6:
                break
        else:
            damping *= 5
    return _calibration(at, architectures, source)


def calibration_runs() -> list[Run]:
    """Those whose part it is."""
    return [run for run in runs() if run.part == "calibration"]


def _architecture(run: Run) -> str:
    known = hardware()
    return known.device(known.machine(run.machine).device).architecture


def _logit(share: float) -> float:
    return math.log(share / (1 - share))


def _calibration(point: Vector, architectures: Sequence[str], source: str) -> Calibration:
    operands, *shares = point.tolist()
    values = [Constant(value=1 / (1 + math.exp(-x)), unit="share", source=source) for x in shares]
    return Calibration(
        operands=Constant(value=math.exp(operands), unit="times", source=source),
        flash=dict(zip(architectures, values[len(SHARES) :], strict=True)),
        **dict(zip(SHARES, values, strict=False)),
    )


def main() -> None:
    """Fit and write."""
    chosen = calibration_runs()
    names = ", ".join(dict.fromkeys(run.name.split()[0] for run in chosen))
    tables = " and ".join(dict.fromkeys(run.table for run in chosen))
    source = f"least squares over {len(chosen)} runs of {tables}: {names}"
    fitted = fit(chosen, source)
    rounded = {name: _rounded(value) for name, value in fitted.model_dump().items()}
    write_json(FILE, rounded)
    print(f"{FILE}: {source}")


def _rounded(tree: dict[str, object]) -> dict[str, object]:
    """Four digits are more than the data hold."""
    return {
        k: _rounded(v) if isinstance(v, dict) else round(v, 4) if isinstance(v, float) else v for k, v in tree.items()
    }


if __name__ == "__main__":
    main()
