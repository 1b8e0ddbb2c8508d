"""Which answers the cost model may give. Decided by published runs alone, never by opinion.

A question belongs to a *capability*: what is asked, of which device, division of work, scale and technique. So does
every held-out run, by the same rule. The state of a capability follows from its runs:

- withdrawn:   one of them is outside the bound of a single run, or the mean of at least ``LEAST_RUNS`` outside its
               own: asking raises, with the reason
- validated:   at least ``LEAST_RUNS`` of them, within both bounds
- unvalidated: the rest; asking raises, unless one asks for unvalidated answers, and then the answer says so

A run that rests on an assumption, of its workload or of a constant of its machine, may contradict and confirms nothing.
The bounds were written before the first fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, Literal, NamedTuple, TypeVar

from equigrad.config.layout import Layout
from equigrad.errors import UserError
from equigrad.plan.hardware import hardware
from equigrad.plan.memory import Memory, memory
from equigrad.plan.published import Run
from equigrad.plan.step import Step, step
from equigrad.plan.validation import QUANTITIES, Errors, Quantity, assumed, run_errors
from equigrad.plan.workload import Workload

MEAN, WORST = 0.10, 0.20
"""Largest mean and largest single error of held-out runs, for throughput and memory of dense and sparse models."""
LEAST_RUNS = 3
"""Fewer may contradict, but confirm nothing."""
SCALES = (64, 512, 4096)
"""GPUs; what holds for so many is not taken to hold for more."""

State = Literal["validated", "withdrawn", "unvalidated"]
T = TypeVar("T")

UNTESTED = {
    "step time with two-hop expert dispatch": "no published run measures a step with it against one without",
}
"""Withdrawn until runs validate them: what a model of a part says of the whole."""


class Withdrawn(UserError):
    """The model was tested on this and failed, or may not be asked before it is tested."""


class Unvalidated(UserError):
    """Nothing tells whether the model is right about this."""


class Capability(NamedTuple):
    """A kind of question.

    Example: ``Capability("throughput", "H100", "sharded", "up to 64 GPUs", "flash attention")``
    """

    quantity: Quantity
    device: str
    division: str
    scale: str
    technique: str

    def __str__(self) -> str:
        return f"{self.quantity} on {self.device}, {self.division}, {self.scale}, {self.technique}"


def capability(quantity: Quantity, work: Workload, machine: str) -> Capability:
    """What a question about a workload on a kind of machine belongs to. Bytes are the same on any device, in any number
    of them; for throughput, devices that differ in memory alone are one."""
    techniques = [f"{work.attention} attention"]
    techniques += ["8-bit products"] * work.fp8 + ["offload"] * work.offload
    techniques += ["experts"] * any(layer.sparse for layer in work.shape.layers)
    if quantity == "memory":
        techniques[0] = "unfused attention" if work.attention == "unfused" else "attention in tiles"
        techniques = [technique for technique in techniques if technique != "8-bit products"]
        return Capability(quantity, "any device", _division(work.layout), "any number of GPUs", ", ".join(techniques))
    device = hardware().machine(machine).device.partition("_")[0].upper()
    return Capability(quantity, device, _division(work.layout), _scale(work.layout.world_size), ", ".join(techniques))


def mixed(quantity: Quantity, work: Workload, machines: Sequence[str], gpus: int) -> Capability:
    """The same for plans that use several kinds of nodes together."""
    which = [capability(quantity, work, machine) for machine in machines]
    devices = " + ".join(dict.fromkeys(one.device for one in which))
    scale = which[0].scale if quantity == "memory" else _scale(gpus)
    return which[0]._replace(device=devices, division="mixed nodes", scale=scale)


def _scale(gpus: int) -> str:
    return next((f"up to {most} GPUs" for most in SCALES if gpus <= most), "more GPUs")


def _division(layout: Layout) -> str:
    """Replicas are told only where nothing divides a sample's work."""
    kinds = {"tensor": layout.tp, "pipeline": layout.pp, "context": layout.cp, "expert": layout.ep}
    words = [name for name, degree in kinds.items() if degree > 1]
    if layout.dp_shard > 1:
        words.insert(0, "sharded")
    elif layout.dp_replicate > 1 and not words:
        words.append("replicated")
    return " + ".join(words) or "one GPU"


@cache
def evidence() -> dict[Capability, Errors]:
    """Every capability that held-out runs belong to, and how wrong the model is there."""
    return _held_out(on_assumptions=False)


@cache
def doubts() -> dict[Capability, Errors]:
    """The same for runs that rest on assumptions."""
    return _held_out(on_assumptions=True)


def _held_out(on_assumptions: bool) -> dict[Capability, Errors]:
    found: dict[Capability, list[tuple[Run, float]]] = {}
    for quantity in QUANTITIES:
        for run, error in run_errors(quantity):
            if run.part == "held out" and assumed(run, quantity) == on_assumptions:
                found.setdefault(capability(quantity, run.work, run.machine), []).append((run, error))
    return {which: Errors.of(errors) for which, errors in found.items()}


def contradiction(which: Capability) -> Errors | None:
    """Errors out of bounds, where there are such."""
    for errors in (evidence().get(which), doubts().get(which)):
        if errors and (errors.worst > WORST or (errors.runs >= LEAST_RUNS and errors.mean > MEAN)):
            return errors
    return None


def state(which: Capability) -> State:
    """What may be said about a capability."""
    if contradiction(which):
        return "withdrawn"
    errors = evidence().get(which)
    return "validated" if errors and errors.runs >= LEAST_RUNS else "unvalidated"


@dataclass(frozen=True)
class Answer(Generic[T]):
    """A prediction, and what is known of its kind."""

    value: T
    capability: Capability
    state: State
    errors: Errors | None

    @property
    def label(self) -> str:
        """To be shown wherever the value is."""
        if self.state == "validated" and self.errors is not None:
            return f"validated: {_shown(self.errors)}"
        return f"UNVALIDATED: {_few(self.errors)}"


def _shown(errors: Errors) -> str:
    return f"mean error {errors.mean:.1%}, worst {errors.worst:.1%} over {errors.runs} held-out runs"


def _few(errors: Errors | None) -> str:
    number = errors.runs if errors else 0
    return f"{number or 'no'} published run{'s' * (number != 1)} to test it against"


def permit(which: Capability, unvalidated: bool = False) -> State:
    """The state of a capability that may be asked for; else ``Withdrawn`` or ``Unvalidated``."""
    if wrong := contradiction(which):
        raise Withdrawn(
            f"withdrawn: {which}: {_shown(wrong)} ({wrong.name}), and the bounds are {MEAN:.0%} and {WORST:.0%}"
        )
    found = state(which)
    if found == "unvalidated" and not unvalidated:
        few = _few(evidence().get(which))
        raise Unvalidated(f"unvalidated: {which}: {few}; --unvalidated answers all the same, and says so")
    return found


def permit_untested(name: str) -> None:
    """``Withdrawn`` for what may not be asked before runs validate it."""
    if name in UNTESTED:
        raise Withdrawn(f"withdrawn: {name}: {UNTESTED[name]}")


def ask_step(work: Workload, machine: str, unvalidated: bool = False) -> Answer[Step]:
    """The time of a step. Raises ``Withdrawn`` and ``Unvalidated``."""
    which = capability("throughput", work, machine)
    found = permit(which, unvalidated)
    return Answer(step(work, machine), which, found, evidence().get(which))


def ask_memory(work: Workload, machine: str, unvalidated: bool = False) -> Answer[Memory]:
    """The memory of the rank that needs most. Raises ``Withdrawn`` and ``Unvalidated``."""
    which = capability("memory", work, machine)
    found = permit(which, unvalidated)
    return Answer(memory(work), which, found, evidence().get(which))
