"""Whole matrices on the ranks that work on them, and what came of them back to all that hold a part.

Everything follows from placements. Who works on what is decided by cost, the costliest first, alike on every rank and
without a word; no matrix is worked on twice, however many copies of the model there are. Each entry of a matrix travels
once to the rank that works on it, unless that rank has it, and comes back once to each other rank that holds it. There
is one exchange there and one back for each wave of matrices; the next wave travels while one is worked on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from equigrad.parallel.collectives import Axis
from equigrad.parallel.placement import Placement
from equigrad.parallel.ranks import gather

_WAVES = 4
"""Exchanges of a step, there and back. More overlap better, and send smaller messages."""


class Matrix(NamedTuple):
    """A parameter [rows, columns], or a member of a stack of them."""

    name: str
    member: int | None
    rows: int
    columns: int

    @property
    def cost(self) -> int:
        """Operations of a product with itself, on the smaller side, halved."""
        return self.rows * self.columns * min(self.rows, self.columns)


class _Box(NamedTuple):
    """What a rank holds of a matrix; ``at``: where in its part of the stack."""

    rows: slice
    columns: slice
    at: int | None

    @property
    def numel(self) -> int:
        return (self.rows.stop - self.rows.start) * (self.columns.stop - self.columns.start)

    def local(self, tensor: Tensor) -> Tensor:
        """The view of it in the rank's tensor, or in one of a number for each row."""
        return tensor if self.at is None else tensor[self.at]


class _Piece(NamedTuple):
    """A box that travels. ``matrix``: its number."""

    matrix: int
    source: int
    target: int
    box: _Box


class _Wave(NamedTuple):
    """Pieces in the order in which they lie in messages, and the stacks of the matrices that are worked on here."""

    there: list[_Piece]
    back: list[_Piece]
    stacks: list[list[int]]


Stack: TypeAlias = tuple[Tensor, Tensor | None]
"""Matrices of one shape [k, m, n], and of each a number for each row [k, m], or none."""
Work: TypeAlias = Callable[[Tensor, Tensor | None], Stack]
"""A stack -> the same of what it is made into."""


class Exchange:
    """The matrices that the ranks of an axis hold in parts.

    sent: bytes that this rank has sent so far
    """

    def __init__(self, held: Mapping[str, Placement], axis: Axis) -> None:
        """``held``: of this rank, the same names on every rank; parts may be empty. A collective."""
        self._axis, self.sent = axis, 0
        everyone = [held] if axis.group is None else gather(held, axis.group)
        self.matrices, boxes = _matrices(everyone)
        self.owners = _owners(self.matrices, boxes)
        self._waves = [self._wave(numbers, boxes) for numbers in _waves(self.matrices, self.owners, axis.size)]

    def _wave(self, numbers: Sequence[int], boxes: Sequence[Sequence[_Box | None]]) -> _Wave:
        wave = _Wave([], [], [])
        of_shape: dict[tuple[int, int], list[int]] = {}
        for number in numbers:
            owner, senders = self.owners[number], dict[tuple[int, ...], int]()
            for rank, box in enumerate(boxes[number]):
                if box is None:
                    continue
                wave.back.append(_Piece(number, owner, rank, box))
                where = (box.rows.start, box.columns.start)
                # Of the ranks that hold the same, the owner itself, or its nearest neighbour.
                if where not in senders or abs(rank - owner) < abs(senders[where] - owner):
                    senders[where] = rank
            for rank in senders.values():
                box = boxes[number][rank]
                assert box is not None
                wave.there.append(_Piece(number, rank, owner, box))
            if owner == self._axis.rank:
                of_shape.setdefault(self.matrices[number][2:], []).append(number)
        wave.stacks.extend(of_shape.values())
        return wave

    def run(self, tensors: Mapping[str, Tensor], rows: Mapping[str, Tensor] | None, work: Work) -> None:
        """Replace the matrices, whose parts ``tensors`` are, by what ``work`` makes of them.

        rows: a number for each row of what is here, [..., rows], which goes along and is replaced too
        """
        like = next(iter(tensors.values()), None)
        if like is None:
            return

        def local(piece: _Piece) -> list[Tensor]:
            name = self.matrices[piece.matrix].name
            return [piece.box.local(of[name]) for of in (tensors, rows) if of is not None]

        def begin(wave: _Wave) -> tuple[list[Stack], Callable[[], None]]:
            stacks = [self._room(numbers, like, rows is not None) for numbers in wave.stacks]
            return stacks, self._transfer(wave.there, local, _parts(wave, stacks), like)

        finish, under_way = [], begin(self._waves[0])
        for number, wave in enumerate(self._waves):
            stacks, arrived = under_way
            if number + 1 < len(self._waves):
                under_way = begin(self._waves[number + 1])
            arrived()
            done = [work(*stack) for stack in stacks]
            finish.append(self._transfer(wave.back, _parts(wave, done), local, like))
        for taken in finish:
            taken()

    def _room(self, numbers: Sequence[int], like: Tensor, with_rows: bool) -> Stack:
        shape = (len(numbers), *self.matrices[numbers[0]][2:])
        return like.new_empty(shape), like.new_empty(shape[:2]) if with_rows else None

    def _transfer(
        self,
        pieces: Sequence[_Piece],
        read: Callable[[_Piece], list[Tensor]],
        write: Callable[[_Piece], list[Tensor]],
        like: Tensor,
    ) -> Callable[[], None]:
        """Start to send what ``read`` has of this rank's pieces; what is returned waits, and has ``write`` filled."""
        me, ranks = self._axis.rank, range(self._axis.size)
        for piece in pieces:
            if piece.source == piece.target == me:
                for to, part in zip(write(piece), read(piece), strict=True):
                    to.copy_(part)
        # On every rank the same: whether there is anything to exchange.
        away = [piece for piece in pieces if piece.source != piece.target]
        if self._axis.group is None or not away:
            return lambda: None
        sent = [[part for p in away if (p.source, p.target) == (me, rank) for part in read(p)] for rank in ranks]
        taken = [[part for p in away if (p.source, p.target) == (rank, me) for part in write(p)] for rank in ranks]
        outward, inward = ([sum(part.numel() for part in parts) for parts in of] for of in (sent, taken))
        flat = torch.cat([like.new_empty(0), *(part.reshape(-1) for parts in sent for part in parts)])
        received = like.new_empty(sum(inward))
        self.sent += flat.numel() * flat.element_size()
        waiting = dist.all_to_all_single(received, flat, inward, outward, self._axis.group, async_op=True)

        def finish() -> None:
            waiting.wait()
            views = [part for parts in taken for part in parts]
            for view, values in zip(views, received.split([view.numel() for view in views]), strict=True):
                view.copy_(values.view_as(view))

        return finish


def _parts(wave: _Wave, stacks: Sequence[Stack]) -> Callable[[_Piece], list[Tensor]]:
    """The views of a piece in the stacks of whole matrices."""
    place = {number: (s, k) for s, numbers in enumerate(wave.stacks) for k, number in enumerate(numbers)}

    def parts(piece: _Piece) -> list[Tensor]:
        stack, at = place[piece.matrix]
        whole, rows = stacks[stack]
        found = [whole[at, piece.box.rows, piece.box.columns]]
        return found if rows is None else [*found, rows[at, piece.box.rows]]

    return parts


def _matrices(everyone: Sequence[Mapping[str, Placement]]) -> tuple[list[Matrix], list[list[_Box | None]]]:
    """All matrices in name order, and of each what every rank holds."""
    matrices, boxes = [], []
    for name, first in sorted(everyone[0].items()):
        *stack, rows, columns = first.shape
        for member in range(stack[0]) if stack else [None]:
            matrices.append(Matrix(name, member, rows, columns))
            boxes.append([_box(held[name], member) for held in everyone])
    return matrices, boxes


def _box(placement: Placement, member: int | None) -> _Box | None:
    at = None if member is None else member - placement.offset[0]
    if not placement.numel or (at is not None and not 0 <= at < placement.local_shape[0]):
        return None
    rows, columns = (
        slice(start, start + size)
        for start, size in zip(placement.offset[-2:], placement.local_shape[-2:], strict=True)
    )
    return _Box(rows, columns, at)


def _owners(matrices: Sequence[Matrix], boxes: Sequence[Sequence[_Box | None]]) -> list[int]:
    """Who works on each matrix: the costliest first, to the rank that has most of it among those whose fair share is
    not used up, else to the one with the least to do."""
    ranks = len(boxes[0]) if boxes else 1
    fair = sum(matrix.cost for matrix in matrices) / ranks
    load, owners = [0] * ranks, [0] * len(matrices)
    for number in sorted(range(len(matrices)), key=lambda i: (-matrices[i].cost, i)):
        cost = matrices[number].cost
        held = [box.numel if box is not None else 0 for box in boxes[number]]
        room = [rank for rank in range(ranks) if load[rank] + cost <= fair]
        owner = min(room or range(ranks), key=lambda r: (-held[r], load[r], r) if room else (load[r], -held[r], r))
        owners[number] = owner
        load[owner] += cost
    return owners


def _waves(matrices: Sequence[Matrix], owners: Sequence[int], ranks: int) -> Iterator[list[int]]:
    """The numbers of the matrices of each wave: about as much of each owner's work in each."""
    count = _WAVES if ranks > 1 else 1
    waves: list[list[int]] = [[] for _ in range(count)]
    for owner in range(ranks):
        own = [number for number, o in enumerate(owners) if o == owner]
        total, done = sum(matrices[number].cost for number in own), 0
        for number in own:
            waves[min(count - 1, done * count // max(total, 1))].append(number)
            done += matrices[number].cost
    yield from (sorted(wave) for wave in waves if wave)
