"""The decoding cache: slots of sequences that come and go. What layers compute with it is tested with those layers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from equigrad.numerics.attention import packed_attention
from equigrad.numerics.cache import DecodingCache
from equigrad.numerics.native import NativeOps
from equigrad.numerics.ops import AttentionLayer

ops = NativeOps()


class Texts:
    """Sequences by name, and what each is to attend to if all of it were computed together."""

    def __init__(self, window: int | None, sinks: bool) -> None:
        self._random, self._layer = torch.Generator().manual_seed(0), AttentionLayer(0, window)
        self._sinks = self._drawn(4) if sinks else None
        self.cache = DecodingCache(5, 12, 2, 8, torch.float32, torch.device("cpu"))
        self.names = list[str]()
        self._known = dict[str, list[Tensor]]()

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random)

    def prefill(self, **lengths: int) -> None:
        self.names += lengths
        self._attend(self.cache.prefill(list(lengths.values())), lengths)

    def step(self) -> None:
        self._attend(self.cache.step(), dict.fromkeys(self.names, 1))

    def like(self, name: str, *more: str) -> None:
        self.names += more
        self._known |= {other: [x.clone() for x in self._known[name]] for other in more}

    def _attend(self, row: Any, lengths: dict[str, int]) -> None:
        new = [[self._drawn(n, heads, 8) for n in lengths.values()] for heads in (4, 2, 2)]
        out = ops.attention(*(torch.cat(x) for x in new), self._layer, row, self._sinks).split(list(lengths.values()))
        for name, part, *own in zip(lengths, out, *new, strict=True):
            before = self._known.get(name, [x[:0] for x in own])
            self._known[name] = [torch.cat(both) for both in zip(before, own, strict=True)]
            whole = packed_attention(*self._known[name], [len(self._known[name][0])], self._layer.window, self._sinks)
            torch.testing.assert_close(part, whole[-len(part) :], rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sinks", [False, True])
def test_sequences_that_come_go_move_and_multiply_attend_to_their_own_tokens(window: int | None, sinks: bool) -> None:
    texts = Texts(window, sinks)
    texts.prefill(a=7, b=2, c=5)
    texts.step()
    assert texts.cache.drop([0]) == [2, 1]  # the last one has the slot of a, which was longer
    texts.names = ["c", "b"]
    texts.step()
    texts.prefill(d=3)
    texts.cache.put_aside(2)
    texts.like("d", "aside")
    texts.names.pop()
    texts.step()
    texts.cache.fork(1, 1)
    texts.like("b", "b2")
    texts.step()
    assert texts.cache.drop([3, 0]) == [2, 1]
    texts.names = ["d", "b"]
    texts.cache.resume(2)
    texts.like("aside", "d2", "d3")
    texts.step()
    texts.prefill(e=1)
    texts.step()
    assert texts.names == ["d", "b", "d2", "d3", "e"]
    assert texts.cache.lengths == [7, 8, 5, 5, 2]
    with pytest.raises(ValueError, match="6 sequences in a cache of 5"):
        texts.prefill(f=1)
