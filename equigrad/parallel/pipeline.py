"""Pipeline parallelism: performs the program of one rank over the stages that it holds.

It knows tensors, messages, autograd and sharded parameters. It does not know what a stage computes, nor why the actions
stand in their order: ``equigrad.schedule.pipeline`` makes the program, this side of the arrows sees only its records.
"""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup

from equigrad.parallel.program import Action, Exchange, Program, StageAction, Transfer

if TYPE_CHECKING:
    from torch.distributed import Work


class Stage(Protocol):
    """A consecutive part of the model.

    module: holds its parameters; where they are sharded, it is an FSDP module itself
    """

    @property
    def module(self) -> nn.Module: ...

    def forward(self, x: Tensor | None, microbatch: int) -> Tensor:
        """The hidden state that enters -> the one that leaves.

        The first stage gets None. The last returns its share of the loss, a scalar: for a micro-batch without tokens 0,
        a sum over nothing, through which every parameter still gets a gradient.
        """
        ...


@dataclass(frozen=True)
class Hidden:
    """The hidden states that enter stages, known everywhere in advance, so that receivers need not ask.

    shape: of (stage, micro-batch), for every stage but the first; usually [T, H], and T may be 0
    """

    shape: Callable[[int, int], tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device


class Deferral(AbstractContextManager[Any], Protocol):
    """Collects the weight gradients of backward passes in its ``with`` block and computes them in ``run``."""

    def run(self) -> None: ...


def run_pipeline(
    program: Program,
    stages: Mapping[int, Stage],
    hidden: Hidden,
    defer: Callable[[], Deferral],
    group: ProcessGroup | None = None,
) -> dict[int, Tensor]:
    """Forward and backward of all micro-batches; afterwards every parameter of ``stages`` has its gradient added.
    Where the program has no backward actions, only the losses are computed, without a graph.

    stages: this rank's, by number
    defer:  makes the collectors for split backward passes: ``equigrad.numerics.deferred.DeferredWeightGradients``
    group:  the ranks of the pipeline in order; None for a pipeline of one rank. With NCCL it has been initialised
            before, by its device or by a collective

    Returns the losses by micro-batch, detached, on the rank of the last stage, and nothing elsewhere. An error is
    raised on the rank where it happens; a rank that waits for it gives up after the timeout of the group.

    A sharded stage stays gathered from its unshard to its reduce, whatever ``reshard_after_forward`` was: its FSDP
    switches belong to the pipeline.
    """
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    if (rank, ranks) != (program.rank, program.ranks):
        raise ValueError(f"this is rank {rank} of {ranks}, the program is for rank {program.rank} of {program.ranks}")
    own = set(range(rank, program.stages, ranks))
    if set(stages) != own:
        raise ValueError(f"rank {rank} needs stages {sorted(own)}, not {sorted(stages)}")
    run = _Run(program, stages, hidden, defer, group)
    with torch.set_grad_enabled(program.backward):
        for step in program.steps:
            try:
                run.perform(step)
            except Exception as error:
                error.add_note(f"pipeline rank {rank}, {step}")
                raise
    run.settle(0)
    return run.losses


# A rank that is ahead of its neighbours goes on, but not so far that what it sends fills its memory.
_SENDS_IN_FLIGHT = 4

# What passes between stages: (what, the stage that needs it, micro-batch).
_Key = tuple[str, int, int]


class _Run:
    """The state of one pass through a program.

    values:   hidden states and gradients that wait for the action or the message that needs them
    arriving: receives that are posted, by what they bring
    leaving:  sends that are posted; they hold what they send
    entered:  of (stage, micro-batch): the hidden state that entered, until its gradient is there
    left:     of (stage, micro-batch): where the backward pass begins. Not the output itself, so its memory is free as
              soon as it is sent, unless the backward pass needs it
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        hidden: Hidden,
        defer: Callable[[], Deferral],
        group: ProcessGroup | None,
    ) -> None:
        self.stages, self.hidden, self.defer, self.group = stages, hidden, defer, group
        self.rank, self.last, self.backward_follows = program.rank, program.stages - 1, program.backward
        self.values: dict[_Key, Tensor] = {}
        self.arriving: dict[_Key, Work] = {}
        self.leaving: deque[Work] = deque()
        self.entered: dict[tuple[int, int], Tensor] = {}
        self.left: dict[tuple[int, int], GradientEdge | None] = {}
        self.deferred: dict[tuple[int, int], Deferral] = {}
        self.losses: dict[int, Tensor] = {}

    def perform(self, step: Action | StageAction | Exchange) -> None:
        if step.kind == "exchange":
            self.exchange(step.transfers)
        elif step.kind == "unshard":
            _unshard(self.stages[step.stage].module)
        elif step.kind == "reduce":
            _reduce(self.stages[step.stage].module)
        elif step.kind == "reshard":
            _reshard(self.stages[step.stage].module)
        elif step.kind == "forward":
            self.forward(step.stage, step.microbatch)
        elif step.kind == "backward":
            self.backward(step.stage, step.microbatch)
        elif step.kind == "input_backward":
            later = self.deferred[step.stage, step.microbatch] = self.defer()
            with later:
                self.backward(step.stage, step.microbatch)
        else:
            self.deferred.pop((step.stage, step.microbatch)).run()

    def forward(self, stage: int, microbatch: int) -> None:
        x = None
        if stage > 0:
            x = self.take("activation", stage, microbatch)
            if self.backward_follows:
                self.entered[stage, microbatch] = x.requires_grad_()
        y = self.stages[stage].forward(x, microbatch)
        if self.backward_follows:
            self.left[stage, microbatch] = get_gradient_edge(y) if y.requires_grad else None
        if stage == self.last:
            self.losses[microbatch] = y.detach()
            return
        shape = self.hidden.shape(stage + 1, microbatch)
        if y.shape != shape or y.dtype != self.hidden.dtype:
            raise ValueError(
                f"{y.dtype} {[*y.shape]} leaves the stage, not {self.hidden.dtype} {[*shape]} as announced"
            )
        self.values["activation", stage + 1, microbatch] = y.detach()

    def backward(self, stage: int, microbatch: int) -> None:
        """Add the gradients of the stage's parameters and keep that of what entered it."""
        gradient = None if stage == self.last else self.take("gradient", stage, microbatch)
        y = self.left.pop((stage, microbatch))
        if y is not None:
            torch.autograd.backward([y], [gradient])
        if stage > 0:
            x = self.entered.pop((stage, microbatch))
            self.values["gradient", stage - 1, microbatch] = torch.zeros_like(x) if x.grad is None else x.grad

    def take(self, what: str, stage: int, microbatch: int) -> Tensor:
        """A value that another stage has made; waits until it is there."""
        key = what, stage, microbatch
        if key in self.arriving:
            self.arriving.pop(key).wait()
        return self.values.pop(key)

    def exchange(self, transfers: tuple[Transfer, ...]) -> None:
        """Post messages, and wait for none of them. What has no elements needs no message."""
        from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

        posted, operations = [], []
        for transfer in transfers:
            what, stage, microbatch = key = transfer.what, transfer.stage, transfer.microbatch
            if transfer.source == self.rank:
                value = self.values.pop(key).contiguous()
                operation = P2POp(isend, value, group=self.group, group_peer=transfer.target)
            else:
                # A gradient is shaped like what it is the gradient of: that enters the next stage.
                shape = self.hidden.shape(stage if what == "activation" else stage + 1, microbatch)
                value = torch.empty(shape, dtype=self.hidden.dtype, device=self.hidden.device)
                self.values[key] = value
                operation = P2POp(irecv, value, group=self.group, group_peer=transfer.source)
            if value.numel():
                posted.append(transfer)
                operations.append(operation)
        works = batch_isend_irecv(operations) if operations else []
        # NCCL answers a batch with one handle.
        for transfer, work in zip(posted, works if len(works) == len(posted) else works * len(posted), strict=True):
            if transfer.source == self.rank:
                self.leaving.append(work)
            else:
                self.arriving[transfer.what, transfer.stage, transfer.microbatch] = work
        self.settle(_SENDS_IN_FLIGHT)

    def settle(self, most: int) -> None:
        """Wait until at most ``most`` sends are on their way. The order of the program allows to wait for any."""
        while len(self.leaving) > most:
            self.leaving.popleft().wait()


def _units(module: nn.Module) -> list[Any]:
    """The FSDP modules of a stage, the outermost first; none where nothing is sharded."""
    units = [m for m in module.modules() if hasattr(m, "set_requires_gradient_sync")]
    if units and units[0] is not module:
        raise ValueError("parts of the stage are sharded, but not its module: its gradients cannot be reduced together")
    return units


def _unshard(module: nn.Module) -> None:
    """Begin to gather all parameters, to stay until ``_reduce``; the forward pass waits for them."""
    units = _units(module)
    if not units:
        return
    root = units[0]
    root.set_is_last_backward(False)
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_forward(False)
    root.set_reshard_after_backward(False)
    for unit in units:
        unit.unshard(async_op=True)


def _reduce(module: nn.Module) -> None:
    """Sum all gradients over the data lanes, those of deferred weights too, and shard the parameters again."""
    units = _units(module)
    if not units:
        return
    root = units[0]
    root.set_is_last_backward(True)
    root.set_requires_gradient_sync(True)
    root.set_reshard_after_backward(True)
    # What FSDP has autograd call at the end of a backward pass. Here the last gradients did not come from one, and no
    # public method says so.
    root._get_fsdp_state()._root_post_backward_final_callback()


def _reshard(module: nn.Module) -> None:
    """Shard the parameters again where there was no backward pass."""
    for unit in _units(module):
        unit.reshard()
