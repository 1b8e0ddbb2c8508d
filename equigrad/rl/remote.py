"""Sampling on servers: the ranks write the weights of a version together, and the main rank asks."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from equigrad.config import Job
from equigrad.config.rl import Servers
from equigrad.errors import UserError
from equigrad.evaluation import Stopped
from equigrad.parallel.placement import Placed
from equigrad.parallel.ranks import gather, together
from equigrad.parallel.stop import StopRequest
from equigrad.parallel.world import World
from equigrad.rl.engine.external import ExternalEngine
from equigrad.rl.engine.protocol import Completion, Request
from equigrad.rl.sampler import Sampler
from equigrad.rl.sync import Weights, write_weights


class Remote(Sampler):
    """See the module."""

    def __init__(self, job: Job, world: World, parameters: Mapping[str, Placed], config: Servers) -> None:
        """A collective."""
        super().__init__(world)
        self._job, self._folder = job, Path(config.weights)
        self._weights = Weights(parameters)
        self._engine = ExternalEngine(config, job.model.vocabulary)
        self._version: int | None = None

    def update(self, version: int) -> None:
        if version == self._version:
            return

        arriving = iter(self._weights)

        def publish() -> None:
            try:
                if self._world.is_main:
                    written = write_weights(self._folder, arriving, self._job.model, self._job.lora, version)
            finally:
                for _ in arriving:  # the main rank wants the others' parts; and should it fail, they are on their way
                    pass
            if self._world.is_main:
                self._engine.update(written, version)

        together(publish, self._world.patient)
        self._version = version

    def _served(self, requests: Sequence[Request], stop: StopRequest) -> dict[str, Completion]:
        def own() -> list[Completion]:
            if not self._world.is_main:
                return []
            found = list(self._engine.generate(requests, lambda: stop.asked))
            if not stop.asked and (cut := [c.id for c in found if c.finish is None]):
                raise UserError(
                    f"a server has given back request {cut[0]} unfinished, and {len(cut) - 1} more: it is shutting"
                    " down, or somebody else gave it weights"
                )
            return found

        found = together(own, self._world.patient)
        if any(gather(stop.asked, self._world.patient)):
            raise Stopped
        return {completion.id: completion for completion in found}
