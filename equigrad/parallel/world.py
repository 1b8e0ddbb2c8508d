"""This process among the others: rank, device, device mesh, and the few collectives that the loop itself needs.

With one process there is no process group, and every collective is the identity.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh

from equigrad.config.layout import MOST_THREADS, Layout
from equigrad.errors import UserError
from equigrad.parallel import failure
from equigrad.parallel.collectives import ALONE, Axis
from equigrad.parallel.environment import ProcessEnv, check_rendezvous, launched, process_env
from equigrad.parallel.ranks import SharedUserError, agree, gather, together


@dataclass(frozen=True)
class World:
    """One rank's view.

    rank, size:  among all processes
    local_rank:  on this machine
    mesh:        dimensions (pp, dp_replicate, fsdp, tp), fsdp being dp_shard x cp; None with one process
    expert_mesh: dimensions (pp, dp_replicate, expert_fsdp, ep, tp), where fsdp is divided by ep; None where ep is 1
    control:     process group on the CPU for agreements within the loop: waits ``layout.timeout_s``
    patient:     the same, but waits for days where one rank prepares what the others wait for
    axes:        this rank's place along dp_replicate, dp_shard, cp, tp, pp and ep, and among the ranks of its stage of
                 the pipeline, which together have all of its parameters
    """

    layout: Layout
    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh | None
    control: ProcessGroup | None = None
    patient: ProcessGroup | None = None
    axes: Mapping[str, Axis] = field(default_factory=dict)
    expert_mesh: DeviceMesh | None = None

    def axis(self, name: str) -> Axis:
        """This rank's place along one dimension of the layout."""
        return self.axes.get(name, ALONE)

    @property
    def lane(self) -> int:
        """Which data lane this rank belongs to; each computes rows of its own."""
        return self.axis("dp_replicate").rank * self.layout.dp_shard + self.axis("dp_shard").rank

    @property
    def lanes(self) -> int:
        """Number of data lanes."""
        return self.layout.data_lanes

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for all: prints, and writes the run folder's common files."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all ranks, in float64."""
        if self.size == 1:
            return values
        import torch.distributed as dist

        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over all ranks, element by element, in place."""
        if self.size > 1 and values.numel():
            import torch.distributed as dist

            dist.all_reduce(values)
        return values

    def largest(self, values: torch.Tensor) -> None:
        """Replaces each entry by the largest one on all ranks."""
        if self.size > 1 and values.numel():
            import torch.distributed as dist

            dist.all_reduce(values, dist.ReduceOp.MAX)

    def agree(self, facts: Mapping[str, Any], what: str, error: type[Exception] = RuntimeError) -> None:
        """Check that named values (of JSON) are the same on every rank; the error names ranks, value and difference."""
        agree(facts, what, self.control, error)

    def run_where(self, when: bool, action: Callable[[], Any]) -> Any:
        """Run ``action`` on the ranks where ``when`` holds, while the others wait, for days if need be.

        Returns the result on the ranks that ran it, else None. An error on one rank is raised on all of them, as
        ``ranks.together`` says.
        """
        return together(lambda: action() if when else None, self.patient)

    def close(self) -> None:
        """Leave the process group. Ranks wait for each other first: gloo aborts if one is still talking."""
        if self.size > 1:
            import torch.distributed as dist

            if (watch := failure.watching()) is not None:
                watch.closing()
            with suppress(Exception):
                self.sum([0.0])
            if watch is not None:
                watch.stop()
            dist.destroy_process_group()


def start(layout: Layout) -> World:
    """Join the process group and build the device mesh. ``UserError`` where the world does not fit the layout, or
    another rank was started with other degrees."""
    env = process_env() or ProcessEnv(0, 1, 0, 1)
    local_size = max(1, env.local_world_size)
    if env.world_size == 1:
        _check_size(layout, 1)
        device = _device(layout, env.local_rank, local_size)
        torch.set_num_threads(_threads(layout, local_size))
        return World(layout, 0, 1, 0, device, None)
    check_rendezvous()
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=layout.timeout_s)
    store, _, _ = next(rendezvous("env://", env.rank, env.world_size, timeout=timeout))
    store.set_timeout(timeout)
    if not launched():
        failure.watch(dist.PrefixStore("failure", store.clone()), env.rank, env.world_size)
    # From here on the others hear of an error. Degrees first: process groups of other ranks would never come together.
    _check_degrees(layout, env.rank, dist.PrefixStore("degrees", store))
    _check_size(layout, env.world_size)
    device = _device(layout, env.local_rank, local_size)
    torch.set_num_threads(_threads(layout, local_size))
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore("default_pg", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    mesh, axes, expert_mesh = make_mesh(layout, device.type)
    control = dist.new_group(backend="gloo", timeout=timeout)
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    _check_devices(device, patient)
    return World(layout, env.rank, env.world_size, env.local_rank, device, mesh, control, patient, axes, expert_mesh)


def make_mesh(layout: Layout, device_type: str) -> tuple[DeviceMesh, dict[str, Axis], DeviceMesh | None]:
    """The device mesh of all processes, this rank's place on each axis of the layout, and the mesh in which experts
    lie. Tensor ranks are neighbours, then context and expert ranks, for they talk most."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (layout.pp, layout.dp_replicate, layout.dp_shard * layout.cp, layout.tp)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    every = mesh._unflatten("fsdp", (layout.dp_shard, layout.cp), ("dp_shard", "cp"))
    sizes = {name: every.size(dim) for dim, name in enumerate(every.mesh_dim_names or ())}
    axes = {n: Axis(every.get_group(n), every.get_local_rank(n), size) for n, size in sizes.items() if size > 1}
    if (size := layout.world_size // layout.pp) > 1:
        stage = mesh["dp_replicate", "fsdp", "tp"]._flatten("stage")
        axes["stage"] = Axis(stage.get_group(), stage.get_local_rank(), size)
    if layout.ep == 1:
        return mesh, axes, None
    experts = mesh._unflatten("fsdp", (shape[2] // layout.ep, layout.ep), ("expert_fsdp", "ep"))
    axes["ep"] = Axis(experts.get_group("ep"), experts.get_local_rank("ep"), layout.ep)
    return mesh, axes, experts


def _check_size(layout: Layout, processes: int) -> None:
    if processes != layout.world_size:
        raise SharedUserError(
            f"layout {layout.describe()} does not fit the {processes} processes that were started;"
            " the product of the degrees must equal their number"
        )


def _check_degrees(layout: Layout, rank: int, store: Store) -> None:
    """``UserError`` on a rank whose degrees are not those of rank 0."""
    store.set(str(rank), layout.describe())
    first = store.get("0").decode()
    if layout.describe() != first:
        raise UserError(f"rank {rank} was started with layout {layout.describe()}, but rank 0 with {first}")


def _threads(layout: Layout, local_size: int) -> int:
    """Of this process. What is no number of threads in the environment is as good as nothing, as it is for OpenMP."""
    given = os.environ.get("OMP_NUM_THREADS", "").strip()
    asked = int(given) if given.isdecimal() and given.isascii() else 0
    return layout.threads or min(asked, MOST_THREADS) or max(1, _cores() // local_size)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device(layout: Layout, local_rank: int, local_size: int) -> torch.device:
    """The GPU of this rank. Where a launcher shows each process but one (SLURM's ``--gpus-per-task=1``), that one."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if layout.device == "cpu" or (layout.device == "auto" and not available):
        return torch.device("cpu")
    if available < local_size and available != 1:
        raise UserError(
            f"layout.device is {layout.device}, but {local_size} processes on this machine see {available} GPUs;"
            ' start one process for each GPU, or set layout.device to "cpu"'
        )
    device = torch.device("cuda", local_rank if available >= local_size else 0)
    torch.cuda.set_device(device)
    # Sums by atomic additions would differ from run to run, and a resumed run from one that never stopped. Not as a
    # warning only: with that, attention keeps its atomic additions.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return device


def _check_devices(device: torch.device, group: ProcessGroup) -> None:
    """Raises ``SharedUserError`` where two ranks would compute on one GPU."""
    mine = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    ids = [one for one in gather(mine, group) if one is not None]
    if len(set(ids)) < len(ids):
        raise SharedUserError("several processes see the same GPU; start one process for each GPU")
