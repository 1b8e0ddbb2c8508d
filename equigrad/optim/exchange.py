"""Whole matrices on the ranks that work on them, and what came of them back to all that hold a part.

No matrix is worked on twice, however many copies of the model there are. Each entry of a matrix travels once to the
rank that works on it, unless that rank has it, and comes back once to each other rank that holds it. There is one
exchange there and one back for each wave of matrices: while one is worked on, the next is on its way there, and the one
before on its way back. Memory holds about two waves at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from equigrad.numerics.budget import WAVE_ENTRIES
from equigrad.optim.assignment import Assignment, Part, Traffic, Wave
from equigrad.optim.division import Division
from equigrad.parallel.collectives import Axis
from equigrad.parallel.placement import Placement

_AT_ONCE = WAVE_ENTRIES // 4
"""Entries that are worked on at once: what is made on the way takes some times their memory."""

Stack: TypeAlias = tuple[Tensor, Tensor | None]
"""Matrices of one shape [k, m, n], and of each a number for each row [k, m], or none."""
Work: TypeAlias = Callable[[Tensor, Tensor | None], Stack]
"""A stack -> the same of what it is made into."""
View: TypeAlias = Callable[[Part], Tensor]
"""Where a part is."""
Wait: TypeAlias = Callable[[], None]


class Exchange:
    """The matrices that the ranks of an axis hold in parts.

    sent: bytes that this rank has sent so far
    """

    def __init__(self, held: Mapping[str, Placement], axis: Axis) -> None:
        """``held``: of this rank, the same names on every rank; parts may be empty. A collective."""
        self._axis, self.sent = axis, 0
        self.assignment = Assignment(Division.among(axis, held))
        self._waves = self.assignment.of(axis.rank)

    def run(
        self,
        make: Callable[[str], Tensor],
        work: Work,
        take: Callable[[str, Tensor], None],
        rows: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``make`` each parameter's part, have the ``work`` done on whole matrices, and ``take`` what came of the part,
        which is in its place.

        rows:  a number for each row of each part, [..., rows], which goes along and is replaced
        dtype: in which matrices travel and are worked on; None: that of their parts
        A collective. A part is in memory from the first wave that has any of it to the last.
        """
        parts: dict[str, Tensor] = {}
        kinds = [_Kind(parts, 3, dtype), *([_Kind(rows, 2)] if rows else [])]

        def begin(wave: Wave) -> tuple[list[list[Tensor]], list[Wait]]:
            parts.update((name, make(name)) for name in wave.first)
            stacks = [kind.room(wave.stacks) for kind in kinds]
            there = [self._transfer(wave.there, k, k.here, k.within(s)) for k, s in zip(kinds, stacks, strict=True)]
            return stacks, there

        def end(wave: Wave, arrived: list[Wait]) -> None:
            for wait in arrived:
                wait()
            for name in wave.last:
                take(name, parts.pop(name))

        under_way = begin(self._waves[0]) if self._waves else ([], [])
        returning: list[tuple[Wave, list[Wait]]] = []
        for number, wave in enumerate(self._waves):
            stacks, arrived = under_way
            if number + 1 < len(self._waves):
                under_way = begin(self._waves[number + 1])
            for wait in arrived:
                wait()
            for stack in zip(*stacks, strict=True):
                _have_done(work, *stack)
            back = [self._transfer(wave.back, k, k.within(s), k.here) for k, s in zip(kinds, stacks, strict=True)]
            if returning:
                end(*returning.pop())
            returning.append((wave, back))
        if returning:
            end(*returning.pop())

    def _transfer(self, traffic: Traffic, kind: "_Kind", read: View, write: View) -> Wait:
        """Start to send what ``read`` has of this rank's parts; what is returned waits, and has ``write`` filled."""
        _copy([write(part) for part in traffic.stay], [read(part) for part in traffic.stay])
        if self._axis.group is None or not traffic.busy:
            return lambda: None
        sent = [[read(part) for part in parts] for parts in traffic.sent]
        taken = [[write(part) for part in parts] for parts in traffic.taken]
        outward, inward = ([sum(view.numel() for view in views) for views in of] for of in (sent, taken))
        flat, received = kind.empty(sum(outward)), kind.empty(sum(inward))
        _copy(*_places(flat, sent))
        self.sent += flat.numel() * flat.element_size()
        waiting = dist.all_to_all_single(received, flat, inward, outward, self._axis.group, async_op=True)

        def finish() -> None:
            waiting.wait()
            values, views = _places(received, taken)
            _copy(views, values)

        return finish


class _Kind:
    """Numbers of one kind that travel: matrices [k, m, n], or one number for each row, [k, m]."""

    def __init__(self, parts: Mapping[str, Tensor], ndim: int, dtype: torch.dtype | None = None) -> None:
        self._parts, self._ndim, self._dtype = parts, ndim, dtype

    def empty(self, *shape: int) -> Tensor:
        return next(iter(self._parts.values())).new_empty(shape, dtype=self._dtype)

    def room(self, shapes: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        return [self.empty(*shape[: self._ndim]) for shape in shapes]

    def here(self, part: Part) -> Tensor:
        of = self._parts[part.name]
        return (of if of.ndim == self._ndim else of[None])[part.held]

    def within(self, stacks: Sequence[Tensor]) -> View:
        return lambda part: stacks[part.stack][(part.at, part.rows, part.columns)[: self._ndim]]


def _places(flat: Tensor, views: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Of each view its place in a message, as a view of its shape; and all views."""
    every = [view for of_rank in views for view in of_rank]
    values = flat.split([view.numel() for view in every])
    return [value.view_as(view) for value, view in zip(values, every, strict=True)], every


def _copy(to: list[Tensor], of: list[Tensor]) -> None:
    """In one call, for parts are many and often small."""
    if to:
        torch._foreach_copy_(to, of)


def _have_done(work: Work, whole: Tensor, rows: Tensor | None = None) -> None:
    """In place, some matrices at a time."""
    count = max(1, _AT_ONCE // whole[0].numel())
    for start in range(0, len(whole), count):
        some = slice(start, start + count)
        made, numbers = work(whole[some], None if rows is None else rows[some])
        whole[some] = made
        if rows is not None and numbers is not None:
            rows[some] = numbers
