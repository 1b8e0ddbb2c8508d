"""Small agreements among ranks. Without a process group this process is the only rank.

Knows nothing of models or files.
"""

import errno
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from equigrad.errors import UserError

T = TypeVar("T")


class SharedUserError(UserError):
    """A user error that every rank raises, so that rank 0 alone needs to show it.

    of_machine: whether it came of what a rank's machine could not do, such as to read a file
    """

    of_machine = False


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
    mine = None
    if failure is not None:
        system = any(isinstance(e, OSError) and e.errno != errno.ENOENT for e in (failure, failure.__cause__))
        mine = isinstance(failure, UserError | OSError), f"{failure}", system
    failures = gather(mine, group)
    for rank, theirs in enumerate(failures):
        if theirs is None:
            continue
        users, text, system = theirs
        if not users:
            raise failure or PeerError(f"rank {rank}: {text}")
        everywhere = all(other == theirs for other in failures)
        shared = SharedUserError(text if rank == 0 or everywhere else f"rank {rank}: {text}")
        shared.of_machine = system
        raise shared from failure
    return value


def agree(
    facts: Mapping[str, Any],
    what: str,
    group: dist.ProcessGroup | None = None,
    error: type[Exception] = RuntimeError,
) -> None:
    """Check that named values (of JSON) are the same on every rank.

    One exchange of a few bytes a value; only where they differ do ranks exchange the values themselves. Raises
    ``error`` on every rank: which ranks differ, in which of ``facts``, and how.
    """
    _, size = rank_and_size(group)
    if size == 1:
        return
    mine = torch.frombuffer(bytearray(b"".join(map(_digest, facts.values()))), dtype=torch.uint8)
    theirs = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(theirs, mine, group)
    if all(torch.equal(mine, other) for other in theirs):
        return
    told = [f"{name}: {_differences(values)}" for name, values in _columns(gather(dict(facts), group)).items()
            if any(value != values[0] for value in values)]  # fmt: skip
    raise error(f"ranks disagree about {what}; " + "; ".join(told))


def _digest(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).digest()[:16]


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row.get(name) for row in rows] for row in rows for name in row}


def _differences(values: Sequence[Any]) -> str:
    """Which ranks differ from most others (from rank 0, where there are as many on either side), and how."""
    texts = [json.dumps(value, sort_keys=True, default=str) for value in values]
    common = max(texts, key=lambda text: (texts.count(text), text == texts[0]))
    usual = texts.index(common)
    odd = [rank for rank, text in enumerate(texts) if text != common]
    shown = f"ranks {', '.join(map(str, odd))} differ" if len(odd) > 1 else f"rank {odd[0]} differs"
    return f"{shown} from rank {usual} ({_difference(values[odd[0]], values[usual], odd[0], usual)})"


def _difference(odd: Any, usual: Any, odd_rank: int, usual_rank: int, key: str = "") -> str:
    """The first part of two values in which they differ, and what it is on either rank."""
    if isinstance(odd, dict) and isinstance(usual, dict):
        name = next(n for n in {**usual, **odd} if odd.get(n) != usual.get(n))
        return _difference(odd.get(name), usual.get(name), odd_rank, usual_rank, f"{key}.{name}".lstrip("."))
    if isinstance(odd, list | tuple) and isinstance(usual, list | tuple) and len(odd) == len(usual):
        at = next(i for i, (x, y) in enumerate(zip(odd, usual, strict=True)) if x != y)
        return _difference(odd[at], usual[at], odd_rank, usual_rank, f"{key}[{at}]")
    prefix = f"{key} " if key else ""
    shown = [text if len(text) <= 60 else f"{text[:60]}…" for text in (str(odd), str(usual))]
    return f"{prefix}{shown[0]} on rank {odd_rank}, {shown[1]} on rank {usual_rank}"
