"""Messages between single ranks of a group, on their way while this rank computes."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

KEYS, GRADIENTS = 0, 1
"""Tags of messages: two kinds may be on their way between two ranks at once."""


class Transfer:
    """Tensors being sent and received. Each is contiguous, of a size that both sides know, and not empty; between two
    ranks, messages of one tag arrive in the order in which both start them.

    ``wait`` before a received tensor is read or a sent one is written to.
    """

    def __init__(
        self,
        sent: Sequence[tuple[Tensor, int]],
        received: Sequence[tuple[Tensor, int]],
        group: dist.ProcessGroup,
        tag: int,
    ) -> None:
        """``sent`` and ``received``: each tensor with the rank, within the group, at its other end."""
        # Sends come first on every rank; started together, they do not wait for each other.
        messages = [dist.P2POp(dist.isend, x, group=group, tag=tag, group_peer=rank) for x, rank in sent]
        messages += [dist.P2POp(dist.irecv, x, group=group, tag=tag, group_peer=rank) for x, rank in received]
        self._works = dist.batch_isend_irecv(messages) if messages else []
        self._tensors = [x for x, _ in (*sent, *received)]

    def wait(self) -> None:
        """Until everything has arrived and has been sent."""
        for work in self._works:
            work.wait()
        self._works, self._tensors = [], []
