"""The fastest of all templates of a space, for small clusters: what a search is measured against and learns from.

Templates are taken in the order of ``Costs.bound``, until that is above the best.
"""

from collections.abc import Iterable, Iterator

from equigrad.plan.mixed.rule import Plan, Rule
from equigrad.plan.mixed.template import Space, Template, ordered


def templates(space: Space) -> Iterator[Template]:
    """All of a space, each once, fewest runs first."""
    level: set[Template] = {()}
    seen: set[Template] = set()
    for _ in range(space.runs):
        level = {larger for template in level for larger in space.grown(template)}
        new = {ordered(template) for template in level} - seen
        yield from sorted(new)
        seen |= new


def exhaustive(rule: Rule, best: Plan | None = None) -> Plan | None:
    """The fastest plan there is. ``best``: one that is known, which saves time."""
    return fastest(rule, templates(rule.costs.space), best)


def fastest(rule: Rule, among: Iterable[Template], best: Plan | None = None) -> Plan | None:
    """The fastest plan of some templates and ``best``; of equals the one that was known, or whose bound is lower."""
    for bound, template in sorted((rule.costs.bound(template), template) for template in among):
        if best is not None and bound >= best.seconds:
            break
        plan = rule.plan(template)
        if plan is not None and (best is None or plan.seconds < best.seconds):
            best = plan
    return best
