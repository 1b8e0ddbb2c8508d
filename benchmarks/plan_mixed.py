"""Plans for several kinds of nodes: how close the search comes to brute force on clusters that its scorer has not seen,
and how far it is above baselines; CPU seconds for 256 GPUs of three kinds, and again when a node is lost.

All in the cost model, which is unvalidated for such clusters: nothing here says how fast training would be.

    python benchmarks/plan_mixed.py
"""

import time

from common import arguments, spread, write

OPTIONS = arguments("plan_mixed", __doc__ or "", rounds=3)

from equigrad.plan.mixed.beam import Found, search  # noqa: E402
from equigrad.plan.mixed.exhaustive import exhaustive  # noqa: E402
from equigrad.plan.mixed.rule import Rule  # noqa: E402
from equigrad.plan.mixed.scorer import scorer  # noqa: E402
from equigrad.plan.mixed.template import shown  # noqa: E402
from equigrad.plan.mixed.train import CLUSTERS, costs, job  # noqa: E402

MODELS = {"small dense": "1B", "large dense": "32B", "experts": "30B of experts"}
Nodes = dict[str, tuple[int, int]]
HELD_OUT: tuple[Nodes, ...] = (
    {"dgx_a100": (1, 8), "dgx_h100": (1, 8)},
    {"dgx_a100": (3, 4), "dgx_h200": (1, 4)},
    {"dgx_a100": (1, 6), "dgx_h100": (1, 8)},
    {"a100_40gb_roce": (2, 4), "dgx_h200": (1, 4)},
    {"dgx_a100": (1, 4), "dgx_h100": (1, 2), "dgx_h200": (1, 2)},
)
"""Nodes, and GPUs of each, by machine; none is one of ``train.CLUSTERS``."""
LARGE: Nodes = {"dgx_a100": (16, 8), "dgx_h100": (8, 8), "dgx_h200": (8, 8)}
SAMPLES = 1024
"""Of a step on ``LARGE``."""


def compared(model: str, cluster: Nodes) -> dict[str, object]:
    """One search beside brute force over the same templates, and beside the best baseline."""
    rule = Rule(costs(job(model), cluster))
    found = search(rule)
    best = exhaustive(rule, found.plans[0] if found.plans else None)
    if best is None:
        return {"cluster": cluster, "fits": False}
    assert found.plans, "brute force found a plan where the search found none"
    one = found.plans[0]
    return {
        "cluster": cluster,
        "fits": True,
        "share": best.seconds / one.seconds,
        "plan": shown(one.template),
        "best": shown(best.template),
        "baselines": {name: plan.seconds / one.seconds for name, plan in found.baselines.items()},
        "scored": found.scored,
        "computed_by_brute_force": rule.priced,
    }


def timed(model: str, cluster: Nodes) -> tuple[list[float], Found]:
    """CPU seconds of a whole search, from the job and the cluster on, nothing kept from another."""
    took = []
    for _ in range(OPTIONS.rounds):
        began = time.process_time()
        task = job(model)
        of = costs(task, cluster)
        of.samples = SAMPLES
        found = search(Rule(of))
        took.append(time.process_time() - began)
    return took, found


def main() -> None:
    assert not any(cluster in CLUSTERS for cluster in HELD_OUT)
    scorer()
    result: dict[str, object] = {}
    for name, model in MODELS.items():
        rows = [compared(model, cluster) for cluster in HELD_OUT]
        shares = [float(str(row["share"])) for row in rows if row["fits"]]
        print(f"{name}: share of brute force on {len(shares)} held-out clusters: least {min(shares):.4f},"
              f" mean {sum(shares) / len(shares):.4f}", flush=True)  # fmt: skip
        took, found = timed(model, LARGE)
        ratios = {key: plan.seconds / found.plans[0].seconds for key, plan in found.baselines.items()}
        lost = {machine: timed(model, LARGE | {machine: (count - 1, devices)})[0]
                for machine, (count, devices) in LARGE.items()}  # fmt: skip
        again = max((spread(seconds) for seconds in lost.values()), key=lambda one: one["median"])
        print(f"  256 GPUs: {spread(took)['median']:.2f} CPU seconds; after a loss, slowest: {again['median']:.2f};"
              f" {shown(found.plans[0].template)}; baselines take {ratios}", flush=True)  # fmt: skip
        result[name] = {
            "held_out": rows,
            "least_share": min(shares),
            "large": {"cpu_seconds": spread(took), "plan": shown(found.plans[0].template), "baselines": ratios},
            "replan_cpu_seconds": {machine: spread(seconds) for machine, seconds in lost.items()},
        }
    write(OPTIONS.json, result)


if __name__ == "__main__":
    main()
