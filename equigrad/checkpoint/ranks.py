"""What a checkpoint needs of the other ranks. Without a process group this process is the only rank.

Knows nothing of tensors or files.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from equigrad.errors import UserError

T = TypeVar("T")


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

    Raises, on every rank: UserError if the first error of any rank is one, or an OSError; otherwise RuntimeError.
    """
    failure: Exception | None = None
    try:
        value = action()
    except Exception as error:
        failure = error
    mine = None if failure is None else (isinstance(failure, UserError | OSError), f"{failure}")
    failures = gather(mine, group)
    for rank, theirs in enumerate(failures):
        if theirs is not None:
            users, text = theirs
            text = f"rank {rank}: {text}" if len(failures) > 1 else text
            raise (UserError if users else RuntimeError)(text) from failure
    return value
