"""Which process this is, as torchrun or SLURM tell it through the environment. Torch-free."""

import os
import re
from typing import NamedTuple

from equigrad.errors import UserError

LAUNCH_FOLDER = "EQUIGRAD_LAUNCH_FOLDER"
"""The variable by which equigrad's own launcher tells workers where to report."""


def launched() -> bool:
    """Whether equigrad's own launcher started this process, and watches it."""
    return bool(os.environ.get(LAUNCH_FOLDER))


class ProcessEnv(NamedTuple):
    """Rank among all processes and among those of this machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def process_env() -> ProcessEnv | None:
    """Rank and world size given by torchrun or SLURM, or None where this process stands alone.

    Under SLURM the rendezvous variables of torch are derived from the job: the first host and a port from its id.
    Raises ``UserError`` where the variables are no numbers, or numbers that no process can have.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        local_rank, local_world_size = _number("LOCAL_RANK", "0"), _number("LOCAL_WORLD_SIZE", "1")
        found = ProcessEnv(_number("RANK"), _number("WORLD_SIZE"), local_rank, local_world_size)
    elif _number("SLURM_NTASKS", "1") > 1 and "SLURM_PROCID" in env and "SLURM_STEP_NODELIST" in env:
        env.setdefault("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"]))
        env.setdefault("MASTER_PORT", str(20000 + _number("SLURM_JOB_ID", "0") % 20000))
        # "8(x2)" is 8 tasks on each of two machines, "8,4" is 8 on the first: an upper bound will do
        local = int(re.split(r"[(,]", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))[0])
        found = ProcessEnv(_number("SLURM_PROCID"), _number("SLURM_NTASKS"), _number("SLURM_LOCALID", "0"), local)
    else:
        return None
    if not 0 <= found.rank < found.world_size or found.local_rank < 0:
        raise UserError(
            f"the environment makes this rank {found.rank} of {found.world_size} processes, {found.local_rank} on its"
            " machine: ranks count from 0 and are less than the number of processes"
        )
    return found


def check_rendezvous() -> None:
    """``UserError`` where the environment does not say where the processes meet."""
    if not os.environ.get("MASTER_ADDR"):
        raise UserError("RANK and WORLD_SIZE are set, but MASTER_ADDR is not: the host of rank 0. torchrun sets it")
    _number("MASTER_PORT")


def _number(name: str, default: str | None = None) -> int:
    """A variable of the environment. ``UserError`` where it is no whole number, or missing without a ``default``."""
    text = os.environ.get(name, default)
    try:
        return int(text or "")
    except ValueError:
        found = "is not set" if text is None else f"is {text!r}"
        raise UserError(f"{name} {found}; it must be a whole number, as torchrun or SLURM sets it") from None


def first_host(nodelist: str) -> str:
    """First host of a SLURM list such as ``node[03-05,9],gpu1`` -> ``node03``."""
    head, bracket, rest = nodelist.partition("[")
    if "," in head or not bracket:
        return head.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]
