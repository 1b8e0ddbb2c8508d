"""Sampling on the ranks that train: replicas of the model, each on one rank or on several that divide it, which get the
weights of every version and share out the requests.

One process needs no replica: it samples with the very tensors that it trains.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from equigrad.build import build_replica
from equigrad.checkpoint.boxes import Box
from equigrad.checkpoint.digest import tree, tree_of_tensors
from equigrad.config import Job
from equigrad.data.tokenizers import Tokenizer
from equigrad.errors import UserError
from equigrad.evaluation import Stopped
from equigrad.execution import WholeModel
from equigrad.models.decoder import Decoder
from equigrad.parallel.collectives import ALONE, Axis
from equigrad.parallel.placement import Placed
from equigrad.parallel.ranks import gather, together
from equigrad.parallel.stop import StopRequest
from equigrad.parallel.world import World
from equigrad.rl.engine.embedded import EmbeddedEngine, Limits
from equigrad.rl.engine.protocol import Completion, Request, never
from equigrad.rl.sampler import Sampler
from equigrad.rl.sync import Weights


class Colocated(Sampler):
    """See the module."""

    def __init__(
        self,
        job: Job,
        world: World,
        parts: Mapping[int, Decoder],
        parameters: Mapping[str, Placed],
        tokenizer: Tokenizer,
    ) -> None:
        """``parameters``: those that are trained, on this rank. A collective."""
        assert job.rl is not None
        super().__init__(world)
        self._check = job.rl.require_updates
        self._replicas, (self._replica, tensor) = world.size // job.rl.tp, _place(world, job.rl.tp)
        self._own: dict[str, Placed] = {}
        self._tensor = tensor
        self._weights = Weights(parameters)
        self._digests: dict[str, str] = {}
        limits = Limits(job.rl.slots, job.data.context)
        self._engine: EmbeddedEngine | None = None
        self._version: int | None = None  # also of ranks that are left over
        if world.size == 1:
            self._engine = EmbeddedEngine(WholeModel(world, parts), limits, {}, decode=tokenizer.decode)
        elif self._replica is not None:
            model = build_replica(job, world.device, tensor)
            self._own = model.placed()
            tensors = {name: placed.tensor for name, placed in self._own.items()}
            self._engine = EmbeddedEngine(model, limits, tensors, tensor=tensor, decode=tokenizer.decode)

    def update(self, version: int) -> None:
        if self._version == version:
            return
        if self._engine is None:
            for _ in self._weights:  # the others want this rank's part of them
                pass
        else:
            self._engine.load(self._parts() if self._own else (), version)
        self._version = version
        if self._check:
            self._compare(version)

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of every tensor."""
        for name, whole in self._weights:
            at = self._own[name].placement
            yield name, whole[Box(at.offset, at.local_shape).slices]

    def _compare(self, version: int) -> None:
        """``SharedUserError`` unless what samples is what trains, and something in it is new."""
        trained = self._weights.digests()
        sampling = trained
        if self._own and self._tensor.size == 1:
            sampling = tree_of_tensors({name: placed.tensor for name, placed in self._own.items()}).nodes
        elif self._own:
            sampling = tree(self._own, self._tensor.group).nodes

        def check() -> None:
            if odd := [name for name in trained if sampling.get(name) != trained[name]]:
                raise UserError(
                    f"rl.require_updates: of version {version}, {odd[0]} is not what was trained, nor are"
                    f" {len(odd) - 1} more; the run stops before it learns from them"
                )
            if self._digests == trained:
                raise UserError(f"rl.require_updates: version {version} has the weights of the version before")

        together(check)
        self._digests = trained

    def _served(self, requests: Sequence[Request], stop: StopRequest) -> dict[str, Completion]:
        alone = self._world.size == 1

        def own() -> list[Completion]:
            if self._engine is None:
                return []
            mine = _share(requests, self._replicas)[self._replica or 0]
            return list(self._engine.generate(mine, (lambda: stop.asked) if alone else never))

        found = together(own, self._world.patient)
        kept = found if self._tensor.rank == 0 else []
        told = gather((kept, stop.asked), self._world.patient)
        if any(asked for _, asked in told):
            raise Stopped
        return {completion.id: completion for part, _ in told for completion in part}


def _place(world: World, size: int) -> tuple[int | None, Axis]:
    """Which replica of ``size`` ranks this rank belongs to, and its place in there; None for a rank that is left over.
    A collective."""
    count = world.size // size
    if size == 1:
        return world.rank, ALONE
    groups = [dist.new_group(list(range(n * size, (n + 1) * size))) for n in range(count)]
    replica, rank = divmod(world.rank, size)
    return (replica, Axis(groups[replica], rank, size)) if replica < count else (None, ALONE)


def _share(requests: Sequence[Request], replicas: int) -> list[list[Request]]:
    """Requests by replica: those of one group together, and about as many tokens for each. On every rank the same."""
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.id if request.group is None else request.group, []).append(request)
    found: list[list[Request]] = [[] for _ in range(replicas)]
    loads = [0] * replicas
    cost = {name: sum(len(r.prompt) + r.most for r in members) for name, members in groups.items()}
    for name in sorted(groups, key=lambda name: -cost[name]):
        least = loads.index(min(loads))
        found[least] += groups[name]
        loads[least] += cost[name]
    return found
