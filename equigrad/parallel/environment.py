"""Which process this is, as torchrun or SLURM tell it through the environment. Torch-free."""

import os
import re
from typing import NamedTuple

from equigrad.errors import UserError


class ProcessEnv(NamedTuple):
    """Rank among all processes and among those of this machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def process_env() -> ProcessEnv | None:
    """Rank and world size given by torchrun or SLURM, or None where this process stands alone.

    Under SLURM the rendezvous variables of torch are derived from the job: the first host and a port from its id.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        try:
            rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
            return ProcessEnv(rank, size, int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1)))
        except ValueError as error:
            raise UserError(f"RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are not numbers: {error}") from None
    if int(env.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in env and "SLURM_STEP_NODELIST" in env:
        env.setdefault("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"]))
        env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", 0)) % 20000))
        # "8(x2)" is 8 tasks on each of two machines, "8,4" is 8 on the first: an upper bound will do
        local = int(re.split(r"[(,]", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))[0])
        rank, size = int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"])
        return ProcessEnv(rank, size, int(env.get("SLURM_LOCALID", 0)), local)
    return None


def first_host(nodelist: str) -> str:
    """First host of a SLURM list such as ``node[03-05,9],gpu1`` -> ``node03``."""
    head, bracket, rest = nodelist.partition("[")
    if "," in head or not bracket:
        return head.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]
