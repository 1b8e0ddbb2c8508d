"""What a plan for mixed nodes decides: pipelines of stages, each on so many GPUs of one kind of nodes. The rest follows
by rule (``rule``). Knows no seconds and no bytes.

A step's samples are divided over pipelines, a pipeline's micro-batches over the lanes of each stage in turn. So stages
of one pipeline need not have as many lanes as each other. GPUs may be left idle.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

MOST_STAGES = 16
"""Alike in one run."""
TENSOR = (1, 2, 4, 8)
"""Degrees of tensor parallelism."""


class Stage(NamedTuple):
    """Example: ``Stage("a100", 8, 2)`` is on 8 GPUs of the nodes ``a100``: four lanes of two tensor ranks."""

    nodes: str
    gpus: int
    tp: int

    @property
    def lanes(self) -> int:
        """Of which each computes micro-batches of its own."""
        return self.gpus // self.tp


Pipeline = tuple[Stage, ...]
Template = tuple[Pipeline, ...]


class Kind(NamedTuple):
    """Of nodes, what a template must suit: GPUs of all and of one, and degrees of tensor parallelism that a model takes
    there."""

    gpus: int
    per_node: int
    tensor: tuple[int, ...]


class Space(NamedTuple):
    """All templates of at most so many runs: alike stages, one behind the other, on all GPUs of a kind that are left or
    on a half, a quarter or an eighth of them.

    stages: of one pipeline, at most (a stage has a layer)
    runs:   one for each kind and one more, unless said otherwise
    """

    kinds: Mapping[str, Kind]
    stages: int
    runs: int

    def left(self, template: Template) -> dict[str, int]:
        """Idle GPUs by kind."""
        left = {name: kind.gpus for name, kind in self.kinds.items()}
        for pipeline in template:
            for stage in pipeline:
                left[stage.nodes] -= stage.gpus
        return left

    def grown(self, template: Template) -> Iterator[Template]:
        """With one more run, at the end of the last pipeline or as a pipeline of its own."""
        for name, gpus in self.left(template).items():
            for run in self._runs(name, gpus):
                if template and len(template[-1]) + len(run) <= self.stages:
                    yield (*template[:-1], template[-1] + run)
                yield (*template, run)

    def changed(self, template: Template) -> Iterator[Template]:
        """With another run in the place of one, or with one left out."""
        for p, pipeline in enumerate(template):
            runs = runs_of(pipeline)
            for r in range(len(runs)):
                ahead, behind = sum(runs[:r], ()), sum(runs[r + 1 :], ())
                others = template[:p], template[p + 1 :]
                rest = (*others[0], *filter(None, (ahead + behind,)), *others[1])
                yield from filter(None, (rest,))
                for name, gpus in self.left(rest).items():
                    for run in self._runs(name, gpus):
                        if len(ahead) + len(run) + len(behind) <= self.stages:
                            yield (*others[0], ahead + run + behind, *others[1])

    def _runs(self, name: str, gpus: int) -> Iterator[Pipeline]:
        kind = self.kinds[name]
        for used in sorted({gpus // part for part in (1, 2, 4, 8)} - {0}, reverse=True):
            for stages in range(1, min(used, self.stages, MOST_STAGES) + 1):
                count, rest = divmod(used, stages)
                for tp in kind.tensor:
                    if not rest and count % tp == 0:
                        yield (Stage(name, count, tp),) * stages


def ordered(template: Template) -> Template:
    """The one of equal templates that stands for them: the order of pipelines means nothing."""
    return tuple(sorted(template))


def shown(template: Template) -> str:
    """In words: ``2 x h100 4 > a100 8 (tp 2) | a100 8``."""
    return " | ".join(" > ".join(_runs_shown(pipeline)) for pipeline in template)


def runs_of(pipeline: Pipeline) -> list[Pipeline]:
    """Alike stages, one behind the other."""
    return [tuple(alike) for _, alike in groupby(pipeline)]


def _runs_shown(pipeline: Pipeline) -> Iterator[str]:
    for run in runs_of(pipeline):
        stage, times = run[0], len(run)
        yield f"{times} x " * (times > 1) + f"{stage.nodes} {stage.gpus}" + f" (tp {stage.tp})" * (stage.tp > 1)
