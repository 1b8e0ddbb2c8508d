"""A measured run of 60 jobs on 32 GPUs."""

import csv
from dataclasses import astuple
from pathlib import Path

import pytest

from equigrad.config.cluster import load_cluster
from equigrad.plan.cluster.figures import Figures, figures
from equigrad.plan.cluster.simulation import Sharing, simulate
from equigrad.plan.cluster.trace import read_measured, read_profiles, read_trace

REPOSITORY = Path(__file__).parents[3]
DATA = REPOSITORY / "benchmarks" / "data" / "cluster_jobs"


def test_figures_are_within_five_percent_of_the_measured_ones() -> None:
    """No job is divided over servers there, so that sharing makes no difference. Nothing is fitted."""
    jobs = read_trace(DATA / "trace_32gpu.csv", read_profiles(DATA / "profile_v100.csv", DATA / "network_v100.csv"))
    spans = read_measured(DATA / "measured_32gpu_colocate.csv", jobs)
    truth = figures([(job.arrival_s, sum(span)) for job, span in zip(jobs, spans, strict=True)])
    servers = load_cluster(REPOSITORY / "docs" / "cluster.toml").servers

    def simulated(sharing: Sharing) -> Figures:
        runs = simulate(jobs, servers, "fcfs", "colocate", sharing).runs
        assert all(len(run.placement) == 1 for run in runs)
        return figures([(run.job.arrival_s, run.end_s) for run in runs])

    assert astuple(simulated("maxmin")) == pytest.approx(astuple(truth), rel=0.05)
    assert astuple(simulated("maxmin")) == pytest.approx(astuple(simulated("none")))


def test_volumes_are_those_of_a_ring_all_reduce() -> None:
    for row in csv.DictReader((DATA / "network_v100.csv").open()):
        workers, tensor = int(row["workers"]), float(row["tensor_mb"])
        assert float(row["volume_mb"]) == pytest.approx(2 * (workers - 1) / workers * tensor, rel=1e-4)
