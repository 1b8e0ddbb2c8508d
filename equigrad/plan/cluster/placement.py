"""On which servers a job's workers go. Pure functions of how many devices are free; they know no job and no time.

Ties go to the server with the lower number, so that a placement depends on nothing but its arguments.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

Placement: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs of a server's number and the workers there, by server: ``((0, 4), (2, 1))`` are five workers on two servers."""

Place: TypeAlias = Callable[[Sequence[int], Sequence[int], int], Placement | None]
"""From the free devices of each server, all devices of each, and a number of workers, to where they go now."""


def pack(free: Sequence[int], devices: Sequence[int], workers: int) -> Placement | None:
    """On as few servers as there is room for now, as soon as enough devices are free anywhere.

    A server that holds all that is left gets it, the one with the least room first (best fit); until then the emptiest.
    """
    if sum(free) < workers:
        return None
    found: dict[int, int] = {}
    while workers:
        left = [(room, server) for server, room in enumerate(free) if room and server not in found]
        fitting = [(room, server) for room, server in left if room >= workers]
        room, server = min(fitting) if fitting else max(left, key=lambda entry: (entry[0], -entry[1]))
        found[server] = min(room, workers)
        workers -= found[server]
    return tuple(sorted(found.items()))


def colocate(free: Sequence[int], devices: Sequence[int], workers: int) -> Placement | None:
    """As ``pack``, but on no more servers than in an empty cluster: waits until so few have room.

    So a job that fits a server is never divided. (Consolidation, as of Philly, arXiv 1901.05758.)
    """
    placement = pack(free, devices, workers)
    if placement is None or len(placement) == 1:
        return placement
    empty = pack(devices, devices, workers)
    return placement if empty is not None and len(placement) <= len(empty) else None


def spread(free: Sequence[int], devices: Sequence[int], workers: int) -> Placement | None:
    """On as many servers as have room, as evenly as that goes, as soon as enough devices are free anywhere. Where there
    are more servers than workers, on the emptiest."""
    if sum(free) < workers:
        return None
    turns = sorted((taken, -room, server) for server, room in enumerate(free) for taken in range(room))
    counts = Counter(server for _, _, server in turns[:workers])
    return tuple(sorted(counts.items()))


PLACEMENTS: dict[str, Place] = {"colocate": colocate, "pack": pack, "spread": spread}
