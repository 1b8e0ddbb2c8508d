"""Random choices that a key decides, and whether something is held out. The same on every machine and every Python."""

import hashlib
import json
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """Random choices, one after another, that depend on the key alone: SHA-256 of the key and a counter.

    Python's own generator keeps only ``random()`` the same from version to version, not what is made of it.
    """

    def __init__(self, *key: str | int) -> None:
        self._key = hashlib.sha256(json.dumps(key).encode()).digest()
        self._drawn = 0

    def below(self, n: int) -> int:
        """One of 0, ..., n - 1, each as likely as any other up to n / 2^256."""
        self._drawn += 1
        digest = hashlib.sha256(self._key + self._drawn.to_bytes(8, "big")).digest()
        return int.from_bytes(digest, "big") % n

    def between(self, low: int, high: int) -> int:
        """One of low, ..., high."""
        return low + self.below(high - low + 1)

    def chance(self, share: float) -> bool:
        """True in that share of cases."""
        return self.below(1 << 53) < share * (1 << 53)

    def choice(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in any order (Fisher and Yates)."""
        found = list(items)
        for last in range(len(found) - 1, 0, -1):
            other = self.below(last + 1)
            found[last], found[other] = found[other], found[last]
        return found


def is_held_out(key: str, every: int) -> bool:
    """Whether what has this key is held out: about one in ``every`` is. No seed has a say, so that what one run trains
    on is not what another is tested on."""
    digest = hashlib.sha256(json.dumps(["held out", key]).encode()).digest()
    return int.from_bytes(digest, "big") % every == 0
