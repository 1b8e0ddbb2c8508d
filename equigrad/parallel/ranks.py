"""Small agreements among ranks. Without a process group this process is the only rank.

Knows nothing of tensors or files.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from equigrad.errors import UserError

T = TypeVar("T")


class SharedUserError(UserError):
    """A user error that every rank raises, so that rank 0 alone needs to show it."""


class PeerError(RuntimeError):
    """Another rank failed; it shows why."""


def rank_and_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """This rank within ``group`` (default: all ranks), and how many there are."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value in rank order, on every rank."""
    _, size = rank_and_size(group)
    if size == 1:
        return [value]
    values: list[T] = [value] * size
    dist.all_gather_object(values, value, group)
    return values


def together(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """This rank's ``action()``, once it has succeeded on all of them: none goes on to wait for one that gave up.

    Raises, on every rank: ``SharedUserError`` if the first error of any rank is a ``UserError`` or an ``OSError``;
    otherwise the rank's own error, and ``PeerError`` on ranks that had none.
    """
    failure: Exception | None = None
    try:
        value = action()
    except Exception as error:
        failure = error
    mine = None if failure is None else (isinstance(failure, UserError | OSError), f"{failure}")
    failures = gather(mine, group)
    for rank, theirs in enumerate(failures):
        if theirs is None:
            continue
        users, text = theirs
        if not users:
            raise failure or PeerError(f"rank {rank}: {text}")
        everywhere = all(other == theirs for other in failures)
        raise SharedUserError(text if rank == 0 or everywhere else f"rank {rank}: {text}") from failure
    return value


def agree(value: Any, what: str, group: dist.ProcessGroup | None = None) -> None:
    """Check that a value is the same on every rank; the error names the ranks that differ."""
    values = gather(value, group)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        raise RuntimeError(f"ranks disagree about {what}: ranks {different} differ from rank 0")
