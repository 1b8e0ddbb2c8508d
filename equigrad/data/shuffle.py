"""Pseudo-random permutations of [0, n) in constant memory. Integers only, so every machine gets the same order."""

import hashlib

import numpy as np

_ROUNDS = 8


class Permutation:
    """A bijection of [0, n) for any n from 1 to 2^62, drawn by the key.

    A Feistel network over the next 2k bits permutes a power of four of at most 4n numbers; walking on until a number
    below n appears (cycle walking) keeps it a bijection of [0, n). See Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002.
    """

    def __init__(self, n: int, *key: int) -> None:
        self._n = n
        self._half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
        digest = hashlib.sha512(",".join(map(str, key)).encode()).digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Where the permutation sends each position, int64 [m] -> int64 [m]."""
        values = self._feistel(positions.astype(np.uint64))
        while (outside := np.flatnonzero(values >= self._n)).size:
            values[outside] = self._feistel(values[outside])
        return values.astype(np.int64)

    def _feistel(self, values: np.ndarray) -> np.ndarray:
        mask = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = values >> self._half, values & mask
        for key in self._keys[:_ROUNDS]:
            left, right = right, left ^ (_mixed(right + key) & mask)
        return left << self._half | right


def _mixed(z: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), modulo 2^64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
