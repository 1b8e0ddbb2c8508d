"""A row on its way to the rank that computes it: that rank's tokens and nothing else.

Whoever prepares rows for others (a data server, a post-training orchestrator) cuts them here and sends bytes; a rank
that reads its own samples cuts them here too and sends nothing. Where a whole row is empty a flag is all there is.
Torch-free, and no pickle.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from equigrad.data.samples import Sample
from equigrad.parallel.partition import Partition

_LENGTH = 8  # bytes of the number that says how long the header is


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One context rank's part of a row.

    lengths: tokens of each segment of the *whole* row, which attention and positions need
    streams: of this rank's tokens, each of shape [own tokens]; a rank may have none although the row has some
    """

    lengths: tuple[int, ...]
    streams: Mapping[str, np.ndarray]

    @property
    def inactive(self) -> bool:
        """Whether the row is empty: nobody in this lane has anything to compute."""
        return not self.lengths

    def to_bytes(self) -> bytes:
        """A header in JSON, behind its length, and the streams as they lie in memory, little-endian."""
        streams = [_little_endian(stream) for stream in self.streams.values()]
        kinds, tokens = tuple([stream.dtype for stream in streams]), len(streams[0]) if streams else 0
        return b"".join([_header(self.lengths, tuple(self.streams), kinds, tokens), *[s.data for s in streams]])

    @classmethod
    def from_bytes(cls, data: bytes) -> "MicroBatch":
        """The inverse; the streams are views of ``data``. Raises ``ValueError`` where that is not whole."""
        try:
            start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
            header = json.loads(data[_LENGTH:start])
            if header.get("inactive"):
                return INACTIVE
            streams = {}
            for name, kind in header["streams"].items():
                streams[name] = np.frombuffer(data, np.dtype(kind), header["tokens"], start)
                start += streams[name].nbytes
            lengths = tuple(map(int, header["lengths"]))
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise ValueError(f"not a micro-batch: {error!r}") from None
        if start != len(data):
            raise ValueError(f"a micro-batch of {start} bytes came as {len(data)}")
        return cls(lengths, streams)


INACTIVE = MicroBatch((), {})


@lru_cache(maxsize=64)  # the parts of a row have the same header but for their tokens, of which there are two numbers
def _header(lengths: tuple[int, ...], names: tuple[str, ...], kinds: tuple[np.dtype, ...], tokens: int) -> bytes:
    header: dict[str, object] = {"inactive": True}
    if lengths:
        streams = {name: kind.str for name, kind in zip(names, kinds, strict=True)}
        header = {"lengths": lengths, "tokens": tokens, "streams": streams}
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(_LENGTH, "little") + text


def _little_endian(stream: np.ndarray) -> np.ndarray:
    """The stream in one piece, as it travels."""
    if stream.dtype.byteorder == ">" or (sys.byteorder == "big" and stream.dtype.byteorder == "="):
        stream = stream.astype(stream.dtype.newbyteorder("<"))
    return np.ascontiguousarray(stream)


def micro_batch(samples: Sequence[Sample], partition: Partition, rank: int) -> MicroBatch:
    """What ``rank`` gets of the row that these samples are, one after another.

    All samples have the same streams. Only the tokens of the rank are touched, so that what each of n ranks costs is a
    part of the row and not the row.
    """
    if not samples:
        return INACTIVE
    names = samples[0].streams.keys()
    if any(sample.streams.keys() != names for sample in samples):
        raise ValueError(f"samples of one row have different streams: {sorted({tuple(s.streams) for s in samples})}")
    lengths = tuple(map(len, samples))
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for start, stop in partition.ranges[rank]:
        first = 0
        for sample in samples:
            low, high = max(start - first, 0), min(stop - first, len(sample))
            if low < high:
                for name in names:
                    pieces[name].append(sample.streams[name][low:high])
            first += len(sample)
    return MicroBatch(lengths, {name: _joined(own, samples[0].streams[name]) for name, own in pieces.items()})


def _joined(pieces: Sequence[np.ndarray], like: np.ndarray) -> np.ndarray:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.zeros(0, like.dtype)
