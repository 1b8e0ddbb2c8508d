"""Small clusters, jobs and traces for the tests of the simulator, and simulators that are slow and simple."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from equigrad.config.cluster import Server
from equigrad.plan.cluster.simulation import Outcome
from equigrad.plan.cluster.trace import Job, Profile

CLUSTER = """\
[[nodes]]
name = "v100"
count = 4
devices = 8
interface_mb_s = 463
inside_mb_s = 16384
"""
PROFILE = """\
model,workers,compute_s,network_s,loading_s
bert,1,0.5,0,10
bert,2,0.5,0.25,20
bert,8,0.5,0.5,30
"""
NETWORK = """\
model,workers,tensor_mb,volume_mb
bert,2,100,100
bert,8,100,175
"""
TRACE = """\
job_id,model,arrival_time,duration,num_iteration,gpu_workers
a,bert,0,110,200,1
b,bert,5,95,100,2
c,bert,5,230,100,8
"""
MEASURED = """\
job_id,start_s,training_s
a,1,100
b,6,100
c,7,200
"""


def write_files(folder: Path, **texts: str) -> dict[str, Path]:
    """The files above, or others given by name (trace, profile, network, measured, cluster)."""
    given = {"trace": TRACE, "profile": PROFILE, "network": NETWORK, "measured": MEASURED, "cluster": CLUSTER} | texts
    paths = {name: folder / f"{name}.{'toml' if name == 'cluster' else 'csv'}" for name in given}
    for name, text in given.items():
        paths[name].write_text(text)
    return paths


def servers(*devices: int, interface: float = 100.0, inside: float = 1e6) -> list[Server]:
    """One server for each number of devices."""
    return [Server(f"s-{number}", count, interface, inside) for number, count in enumerate(devices)]


def job(number: int, workers: int = 2, iterations: int = 10, arrival: float = 0.0, **phases: float) -> Job:
    """Computes for a second, and sends 100 MB in another one, by default."""
    given = {"compute_s": 1.0, "network_s": 1.0, "loading_s": 0.0, "volume_mb": 100.0} | phases
    if workers == 1:
        given |= {"network_s": 0.0, "volume_mb": 0.0}
    return Job(number, str(number), f"trace.csv:{number + 2}", arrival, workers, iterations, Profile(**given))


def fill(demands: Sequence[float], links: Sequence[Sequence[int]], capacity: Sequence[float]) -> list[float]:
    """Max-min fair rates by the definition: the next to stop is whoever has the smallest share, of all interfaces."""
    rates: list[float | None] = [None] * len(demands)
    while None in rates:
        open_ = [n for n, rate in enumerate(rates) if rate is None]
        shares = []
        for n in open_:
            for link in links[n]:
                taken = sum(rates[m] or 0.0 for m in range(len(rates)) if link in links[m])
                shares.append((capacity[link] - taken) / sum(link in links[m] for m in open_))
        least = min([*shares, *(demands[n] for n in open_)])
        for n in open_:
            tight = demands[n] <= least * (1 + 1e-12)
            for link in links[n]:
                taken = sum(rates[m] or 0.0 for m in range(len(rates)) if link in links[m] and m not in open_)
                tight |= (capacity[link] - taken) / sum(link in links[m] for m in open_) <= least * (1 + 1e-12)
            if tight:
                rates[n] = least
    return [rate or 0.0 for rate in rates]


def ends(outcome: Outcome, cluster: Sequence[Server], step: float | None = None) -> list[float]:
    """When the jobs of an outcome end, given when they started and where, from its definition alone.

    All jobs are looked at again at every change, or where ``step`` is given (seconds) so often: then phases end at
    multiples of it.
    """
    capacity = [server.interface_mb_s for server in cluster]
    now, found = 0.0, [0.0] * len(outcome.runs)
    links = [[s for s, _ in run.placement] if len(run.placement) > 1 else [] for run in outcome.runs]
    demand = [run.job.phases.volume_mb / (run.job.phases.network_s or 1.0) for run in outcome.runs]
    state = [("wait", run.start_s) for run in outcome.runs]  # what it does, and how much of it is left (s, MB)
    apart = [0.0 if run.job.phases.volume_mb else run.job.phases.network_s for run in outcome.runs]  # sends nothing
    left = [run.job.iterations for run in outcome.runs]
    while any(kind != "done" for kind, _ in state):
        talking = [n for n, (kind, _) in enumerate(state) if kind == "talk"]
        rates = fill([demand[n] for n in talking], [links[n] for n in talking], capacity)
        speed = dict.fromkeys(range(len(state)), 1.0) | dict(zip(talking, rates, strict=True))
        ahead = [rest / speed[n] for n, (kind, rest) in enumerate(state) if kind != "done"]
        after = min(ahead) if step is None else step
        now += after
        for n, (kind, rest) in enumerate(state):
            rest -= after * speed[n]
            state[n] = kind, rest
            if kind == "done" or rest > 1e-9 * max(1.0, speed[n]):
                continue
            phases = outcome.runs[n].job.phases
            if kind == "wait":
                state[n] = "load", phases.loading_s
            elif kind == "talk" or (kind == "compute" and not phases.volume_mb):
                left[n] -= 1
                state[n] = ("compute", phases.compute_s + apart[n]) if left[n] else ("done", 0.0)
                found[n] = now
            else:
                state[n] = ("compute", phases.compute_s + apart[n]) if kind == "load" else ("talk", phases.volume_mb)
    return found


def overlapping(outcome: Outcome) -> bool:
    """Whether two jobs that use an interface ever did so in the same time."""
    several = [run for run in outcome.runs if len(run.placement) > 1]
    return any(
        a.start_s < b.end_s and b.start_s < a.end_s and {s for s, _ in a.placement} & {s for s, _ in b.placement}
        for a, b in combinations(several, 2)
    )
