"""Two cases compared: bit by bit, or by how far they deviate."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equigrad.audit.cases import Case
from equigrad.checkpoint.boxes import Box
from equigrad.checkpoint.folder import step_name
from equigrad.checkpoint.manifest import Manifest, read_manifest
from equigrad.checkpoint.state import read_tensors


class Bounds(NamedTuple):
    """The largest relative deviation that is put down to rounding: of the loss, of the gradient norm and a parameter's
    gradient, and of the update of a parameter. AdamW divides each entry by its size, so that those which are zero but
    for rounding are updated by rounding: few, and with no more weight than the others."""

    loss: float
    gradient: float
    update: float


BOUNDS = {"float32": Bounds(1e-5, 1e-3, 1e-1), "bfloat16": Bounds(3e-3, 1e-1, 5e-1)}
"""By value type."""
_UNDECIDED = 1e-2
"""The largest part of tokens that may choose another expert: those whose choice hangs on rounding. In a step where any
does, gradients deviate by more than rounding, and have the bound of bfloat16."""
_NOTHING = 1e-300
_FLOAT32 = 2.0**-23
_FLOOR = {"float32": 1e-6, "bfloat16": 1e-3}
"""A gradient that is smaller than this part of the global norm is compared with that part: where it is zero but for
rounding, all of it is deviation."""
_TIMES_ONE = 30
"""What deviates by no more than this many times what one process in native numerics does, is rounding too: so much do
parameters differ in how well their gradients are conditioned."""


@dataclass
class Comparison:
    """
    ok:        no difference, or none beyond the bound
    step:      the first step with a difference; native: that with the largest deviation
    what:      there, what differs first, or deviates most
    detail:    more of that
    deviation: native: the largest of the loss, of the gradient norm, of a parameter's gradient and of its update
    """

    ok: bool = True
    step: int | None = None
    what: str = ""
    detail: str = ""
    deviation: dict[str, float] = field(default_factory=dict)


def compare_bits(one: Case, other: Case, steps: int) -> Comparison:
    """The first difference of ``other``, in the order in which a step computes: its gradients, loss and norm, what
    became of parameters, moments and further state."""
    for step in range(steps + 1):
        ours, theirs = (case.steps / step_name(step) for case in (one, other))
        manifests = read_manifest(ours), read_manifest(theirs)
        figures = [{k: v for k, v in m.meta.items() if k != "copies"} for m in manifests]
        if copies := manifests[1].meta.get("copies"):
            return Comparison(False, step, *_of_copies(copies))
        # The gradients of a step that was refused are what overflowed, and where that is no layout promises.
        said = [float.fromhex(meta[key]) for meta in figures for key in ("loss", "grad_norm") if key in meta]
        found = _unequal(ours, theirs, manifests[1], None if all(map(math.isfinite, said)) else "grad.")
        if found is not None:
            return Comparison(False, step, *found)
        for key, value in figures[0].items():
            if figures[1].get(key) != value:
                a, b = (float.fromhex(each[key]) for each in figures)
                return Comparison(False, step, key, f"{b!r} where one process has {a!r}")
    return Comparison()


def _of_copies(unequal: dict[str, list[int]]) -> tuple[str, str]:
    """The first tensor of which ranks hold different copies, and the ranks."""
    name, ranks = next(iter(unequal.items()))
    return name, f"copies on ranks {ranks} differ from the first rank's, as do those of {len(unequal) - 1} more tensors"


def _unequal(ours: Path, theirs: Path, manifest: Manifest, but: str | None) -> tuple[str, str] | None:
    """The first tensor that differs, and where; ``but``: leave out those whose names begin so."""
    order = {name: number for number, name in enumerate(("grad", "model", "optim", "grids", "routing"))}
    first: tuple[int, str, str] | None = None
    for name, a, b in _pairs(ours, theirs):
        if but is not None and name.startswith(but):
            continue
        rank = order.get(name.partition(".")[0], len(order))
        if (first is None or (rank, name) < first[:2]) and not _same_bits(a, b):
            first = (rank, name, _where(name, a, b, manifest))
    return None if first is None else first[1:]


def _pairs(ours: Path, theirs: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The tensors of two checkpoints of one job, in name order."""
    for (name, a), (other, b) in zip(read_tensors(ours, ""), read_tensors(theirs, ""), strict=True):
        assert name == other
        yield name, a, b


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b)))


def _where(name: str, a: Tensor, b: Tensor, manifest: Manifest) -> str:
    """How many entries differ, by how much, and which ranks wrote them."""
    unequal = a.reshape(-1).view(torch.uint8).view(-1, a.element_size()) != b.reshape(-1).view(torch.uint8).view(
        -1, b.element_size()
    )
    entries = unequal.any(1).view(a.shape)
    boxes = manifest.tensors[name].boxes
    ranks = {int(box.file[5:10]) for box in boxes if bool(entries[Box(box.offset, box.shape).slices].any())}
    size = float((b.double() - a.double()).norm() / a.double().norm().clamp(min=1e-300))
    return f"{int(entries.sum())} of {a.numel()} entries on ranks {sorted(ranks)}, {size:.1e} of its size"


def compare_values(one: Case, other: Case, steps: int, dtype: str, native: Case | None = None) -> Comparison:
    """How far ``other`` deviates, which has the parameters of ``one`` before each step. ``native``: one process that is
    like ``other`` but for the layout, by which is judged what rounding does to each parameter."""
    found, worst = (
        Comparison(deviation=dict.fromkeys(("loss", "gradient norm", "gradient", "update", "moment"), 0.0)),
        -1.0,
    )

    def see(kind: str, what: str, step: int, deviation: float, limit: float) -> None:
        nonlocal worst
        # What is not a number deviates without bound.
        deviation = math.inf if math.isnan(deviation) else deviation
        found.deviation[kind] = max(found.deviation.get(kind, 0.0), deviation)
        found.ok &= deviation <= limit
        if deviation / limit > worst:
            worst, found.step, found.what = deviation / limit, step, what
            found.detail = f"{deviation:.1e} of its size, where rounding is at most {limit:.0e}"

    for step in range(1, steps + 1):
        ours, theirs = (case.steps / step_name(step) for case in (one, other))
        metas: list[dict[str, Any]] = [read_manifest(path).meta for path in (ours, theirs)]
        moved = _moved(ours, theirs)
        if moved:
            see("other experts", "choice of experts", step, moved, _UNDECIDED)
        bounds = BOUNDS["bfloat16" if moved else dtype]
        loss, norm = ([float.fromhex(meta[key]) for meta in metas] for key in ("loss", "grad_norm"))
        see("loss", "loss", step, abs(loss[1] - loss[0]) / max(abs(loss[0]), _NOTHING), bounds.loss)
        see("gradient norm", "gradient norm", step, abs(norm[1] - norm[0]) / max(norm[0], _NOTHING), bounds.gradient)
        if metas[0].get("lr") != metas[1].get("lr"):
            see("update", "learning rate", step, math.inf, bounds.update)
            found.detail = "the rates are not the same"
        if copies := metas[1].get("copies"):
            what, detail = _of_copies(copies)
            see("gradient", what, step, math.inf, bounds.gradient)
            found.detail = detail
        paths = (ours, theirs, *(() if native is None else (native.steps / step_name(step),)))
        unknown: set[str] = set()  # gradients that are zero but for rounding, which AdamW makes whole updates of
        for kind, prefix, before, bound, floor in (
            ("gradient", "grad.", None, bounds.gradient, _FLOOR[dtype] * norm[0]),
            ("update", "model.", one.steps / step_name(step - 1), bounds.update, 0.0),
            ("moment", "optim.", one.steps / step_name(step - 1), bounds.update, 0.0),
        ):
            for name, size, *off in _distances(paths, prefix, before):
                if kind == "gradient" and size <= floor:
                    unknown.add(name)
                if kind != "gradient" and (name if kind == "update" else name.split(".", 1)[1]) in unknown:
                    continue
                size = max(size, floor, *(_TIMES_ONE * d / bound for d in off[1:]), _NOTHING)
                see(kind, name, step, off[0] / size, bound)
    return found


def _distances(paths: Sequence[Path], prefix: str, before: Path | None = None) -> Iterator[tuple[Any, ...]]:
    """Of each tensor of some checkpoints: its name, its norm in the first, and how far those of the others are from it.
    ``before``: the norm of its change since that one, and distances but for the rounding of float32."""
    for together in zip(*(read_tensors(path, prefix) for path in (*paths, *([before] if before else []))), strict=True):
        (name, first), *others = together
        own, rounding, size = first.double(), 0.0, first
        if before is not None:
            rounding = _FLOAT32 * float(own.norm())
            size = own - others.pop()[1].double()
        far = (float((other.double() - own).norm()) for _, other in others)
        yield name, float(size.double().norm()), *(d - min(d, rounding) for d in far)


def _moved(ours: Path, theirs: Path) -> float:
    """The part of all choices of experts that differ, at least."""
    pairs = list(zip(read_tensors(ours, "routing.counts"), read_tensors(theirs, "routing.counts"), strict=True))
    if not pairs:
        return 0.0
    (_, a), (_, b) = pairs[0]
    return float((a - b).abs().sum() / 2 / a.sum().clamp(min=1))
