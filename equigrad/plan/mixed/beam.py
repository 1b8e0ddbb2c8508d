"""A search for templates that the scorer guides, run by run; plans that one would make without it are always among its
candidates, so it is never worse than any of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from equigrad.plan.mixed.baselines import baselines
from equigrad.plan.mixed.features import Features
from equigrad.plan.mixed.rule import Plan, Rule
from equigrad.plan.mixed.scorer import Scorer, scorer
from equigrad.plan.mixed.template import Template, ordered

WIDTH, PRICED = 6, 16
"""Beginnings that are kept of each length, and templates that are made plans of; more on small clusters."""
MANY = 64
"""GPUs of a cluster that is not small: on a half of them, twice as many are kept and made plans of."""
CHANGED = 3
"""Plans that are tried with another run in the place of one."""


@dataclass(frozen=True)
class Found:
    """The best plans, in order; those of ``baselines``; how many templates were scored, and made plans of."""

    plans: list[Plan]
    baselines: dict[str, Plan]
    scored: int
    priced: int


def search(rule: Rule, top: int = 5, guide: Scorer | None = None) -> Found:
    """The best ``top`` plans of a job on mixed nodes; none where nothing was found that fits."""
    return _Search(rule, top, guide or scorer()).run()


class _Search:
    def __init__(self, rule: Rule, top: int, guide: Scorer) -> None:
        self.rule, self.top, self.guide = rule, top, guide
        self.space, self.features = rule.costs.space, Features(rule.costs)
        self.plans: dict[Template, Plan] = {}
        self.more = max(1, MANY // rule.costs.gpus)
        self.seen: set[Template] = set()

    def run(self) -> Found:
        """The beam; then, of the best plans, those with another run in the place of one."""
        known = baselines(self.rule)
        for plan in known.values():
            self.keep(plan)
        level: list[Template] = [()]
        for _ in range(self.space.runs):
            level = self.consider(larger for template in level for larger in self.space.grown(template))[
                : WIDTH * self.more
            ]
        changed: set[Template] = set()
        while len(changed) < CHANGED and (new := [p.template for p in self.best() if p.template not in changed]):
            self.consider(self.space.changed(new[0]))
            changed.add(new[0])
        return Found(self.best(), known, len(self.seen), self.rule.priced)

    def consider(self, templates: Iterable[Template]) -> list[Template]:
        """Make plans of the most promising that are new; all of these, the most promising to go on with first."""
        new = [one for one in set(templates) - self.seen if not self.rule.costs.hopeless(one)]
        if not new:
            return []
        self.seen.update(new)
        own, grown = self.guide.sorted(self.features, new)
        for template in {ordered(one): None for one in own[: PRICED * self.more]}:
            best = self.best()
            plan = self.rule.plan(template, below=best[-1].seconds if len(best) == self.top else inf)
            if plan is not None:
                self.keep(plan)
        return grown

    def keep(self, plan: Plan) -> None:
        """Unless another of the same template is better: uniform ones have their own layers."""
        if plan.template not in self.plans or plan.seconds < self.plans[plan.template].seconds:
            self.plans[plan.template] = plan

    def best(self) -> list[Plan]:
        """In order."""
        return sorted(self.plans.values(), key=lambda plan: (plan.seconds, plan.template))[: self.top]
