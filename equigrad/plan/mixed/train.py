"""Trains the scorer: ``python -m equigrad.plan.mixed.train`` solves small clusters by brute force and writes
``scorer.json``. Nothing is drawn at random. It takes about two minutes.

Each beginning of a template is an example: how much longer than the best plan of all the best plan takes that grows
from it. The squares of errors are made small, with most weight on beginnings that nearly lead to the best, for a search
compares those. The file says how well each cluster's best was found with a scorer that had not seen it.
"""

from collections.abc import Iterator, Sequence
from math import inf, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from equigrad.config.cluster import Nodes
from equigrad.config.job import Job
from equigrad.config.load import make_job
from equigrad.files import write_json
from equigrad.plan.hardware import GB, hardware
from equigrad.plan.mixed.beam import search
from equigrad.plan.mixed.cost import Costs
from equigrad.plan.mixed.features import NAMES, Features
from equigrad.plan.mixed.rule import Rule
from equigrad.plan.mixed.scorer import FILE, Scorer, Weights
from equigrad.plan.mixed.template import Template, ordered
from equigrad.plan.target import target_of

Vector = NDArray[np.float64]

WORST, NEAR, REST, RIDGE = 0.7, 0.15, 0.3, 1e-3
"""Targets are cut off at the first; weights fall by e within the second, and a share of the third is even."""
MODELS: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256},
    "8B": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False},
    "32B": {"hidden_size": 5120, "intermediate_size": 27_648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152_064, "tie_word_embeddings": False},
    "30B of experts": {"family": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
                       "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
                       "experts": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}},
}  # fmt: skip
"""The shapes of Llama-3.2-1B, Llama-3.1-8B, Qwen2.5-32B and Qwen3-30B-A3B, from their public configurations."""
CONTEXT, SAMPLES = {"1B": 4096, "8B": 8192, "32B": 8192, "30B of experts": 8192}, 128
CLUSTERS: tuple[dict[str, tuple[int, int]], ...] = (
    {"a100_40gb_roce": (1, 4), "dgx_h100": (1, 4)},
    {"dgx_a100": (1, 4), "dgx_h100": (2, 2)},
    {"dgx_a100": (2, 4), "dgx_h200": (1, 2)},
    {"dgx_a100": (1, 2), "dgx_h100": (1, 2), "dgx_h200": (1, 2)},
)
"""Machines: nodes, and GPUs of each."""


class Solved(NamedTuple):
    """One model on one cluster, all plans made: features of every beginning; by how much longer than the best of all,
    as a logarithm, its own plan takes, and the best that grows from it."""

    name: str
    rule: Rule
    least: float
    rows: Vector
    own: Vector
    grown: Vector


def job(name: str) -> Job:
    """A model of ``MODELS`` to be trained."""
    context = CONTEXT[name]
    model = MODELS[name] | {"max_position_embeddings": context}
    tree = {"model": model, "data": {"context": context}, "numerics": {"dtype": "bfloat16"},
            "batch": {"tokens": SAMPLES * context, "row_tokens": context}}  # fmt: skip
    return make_job(tree, name)


def costs(task: Job, cluster: dict[str, tuple[int, int]]) -> Costs:
    """A job on so many nodes of so many GPUs of each machine, with the machine's links."""
    kinds = {}
    for machine, (count, devices) in cluster.items():
        found = hardware().machine(machine)
        nodes = Nodes(name=machine, count=count, devices=devices, device=machine,
                      inside_mb_s=found.inside.bandwidth.value * GB / 1e6,
                      interface_mb_s=found.between.bandwidth.value * GB / 1e6 * devices)  # fmt: skip
        kinds[machine] = target_of(nodes)
    return Costs(task, kinds, sound=False)


def solved() -> Iterator[Solved]:
    """Every model on every cluster where it fits."""
    for name in MODELS:
        for cluster in CLUSTERS:
            rule = Rule(costs(job(name), cluster))
            best = grown_best(rule)
            least = min(best.values())
            if least == inf:
                continue
            features, beginnings = Features(rule.costs), sorted(best)
            rows = np.array([features.of(template) for template in beginnings])
            own = [seconds(rule, template) for template in beginnings]
            both = (np.array([min(WORST, log(one / least)) for one in of])
                    for of in (own, [best[template] for template in beginnings]))  # fmt: skip
            gpus = " + ".join(f"{nodes} x {devices} {machine}" for machine, (nodes, devices) in cluster.items())
            yield Solved(f"{name} on {gpus}", rule, least, rows, *both)


def seconds(rule: Rule, template: Template) -> float:
    """Of a template's plan; infinite where it has none."""
    plan = rule.plan(ordered(template))
    return inf if plan is None else plan.seconds


def grown_best(rule: Rule) -> dict[Template, float]:
    """Of each beginning, the seconds of the best plan that grows from it, itself included."""
    space = rule.costs.space
    levels: list[dict[Template, list[Template]]] = []
    level: set[Template] = {()}
    for _ in range(space.runs):
        levels.append({template: list(space.grown(template)) for template in level})
        level = {larger for grown in levels[-1].values() for larger in grown}
    best = {template: seconds(rule, template) for template in level}
    for grown in reversed(levels):
        for template, larger in grown.items():
            best[template] = min([seconds(rule, template), *(best[one] for one in larger)])
    del best[()]
    return best


def fit(examples: Sequence[Solved], source: str = "") -> Scorer:
    """Weighted least squares, each cluster as much as another."""
    own, grown = (
        _weights([(one.rows, getattr(one, which)) for one in examples]) for which in ("own", "grown")
    )  # fmt: skip
    return Scorer(source=source, own=own, grown=grown)


def _weights(examples: Sequence[tuple[Vector, Vector]]) -> Weights:
    size = 2 * len(NAMES)
    normal, right = RIDGE * np.eye(size), np.zeros(size)
    for rows, lost in examples:
        near = np.exp(-lost / NEAR)
        weight = near / near.sum() + REST / len(lost)
        normal += (rows * weight[:, None]).T @ rows
        right += (rows * weight[:, None]).T @ lost
    alone, left = np.linalg.solve(normal, right).round(6).reshape(2, -1).tolist()
    return {name: (one, other) for name, one, other in zip(NAMES, alone, left, strict=True)}


def missed(one: Solved, guide: Scorer) -> float:
    """By how much longer than the best the plan takes that a search finds."""
    return search(one.rule, guide=guide).plans[0].seconds / one.least - 1


def main() -> None:
    """Fit; print by how much searches with scorers that have not seen a cluster miss its best plan; write."""
    examples = list(solved())
    unseen = [missed(one, fit([other for other in examples if other is not one])) for one in examples]
    for one, error in zip(examples, unseen, strict=True):
        print(f"{one.name:<75} {len(one.rows):>6} beginnings, best plan missed by {error:.2%} unseen")
    count = sum(len(one.rows) for one in examples)
    source = (
        f"python -m equigrad.plan.mixed.train: ridge regression over {count:,} beginnings of templates of"
        f" {len(examples)} small clusters solved by brute force ({'; '.join(one.name for one in examples)}). Of each, a"
        f" search with weights that were fitted without it finds a plan that takes {np.mean(unseen):.2%} longer than"
        f" the best in the mean, {max(unseen):.2%} at worst"
    )
    write_json(FILE, fit(examples, source).model_dump(mode="json"))


if __name__ == "__main__":
    main()
