"""``equigrad plan``: the fastest layouts of a job on a cluster; and what the cost model behind it is made of."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import join
from typing import Any

from equigrad.config import Job, dump_toml, load_job
from equigrad.config.cluster import Cluster, load_cluster
from equigrad.data.samples import SampleRef
from equigrad.errors import UserError
from equigrad.files import check_target, write_json, write_text
from equigrad.plan.gates import mixed, permit
from equigrad.plan.mixed import text
from equigrad.plan.mixed.beam import search as search_mixed
from equigrad.plan.mixed.cost import Costs
from equigrad.plan.mixed.rule import Rule
from equigrad.plan.search import Found, Plan, search
from equigrad.plan.space import overrides as changes
from equigrad.plan.space import words
from equigrad.plan.step import stage_seconds
from equigrad.plan.target import MEMORY_SHARE, Target, target, target_of
from equigrad.plan.text import constant_lines, error_lines, left_out_lines, misfit_lines, plan_lines, state_lines
from equigrad.plan.validation import QUANTITIES, Line, by_table
from equigrad.resolve import resolve_weights
from equigrad.schedule.division import divide
from equigrad.schedule.pipeline import Action, Simulation, StageAction, pipeline, simulate
from equigrad.schedule.svg import draw_svg


def main(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Plan, or print what is asked for of the cost model; ``--json`` writes plans, or the errors of tables, as well."""
    if arguments.constants:
        print(*constant_lines(), sep="\n")
    if arguments.validate:
        lines = list(by_table())
        print(*error_lines(lines), "", *state_lines(), sep="\n")
        if arguments.json:
            write_json(Path(arguments.json), [record(line) for line in lines])
    if arguments.constants or arguments.validate:
        return 0
    if not arguments.job or not arguments.cluster:
        missing = "--cluster CLUSTER.toml is" if arguments.job else "JOB.toml and --cluster CLUSTER.toml are"
        raise UserError(f"{missing} missing; or give --validate or --constants")
    return _plan(arguments, overrides)


def _plan(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    if arguments.top < 1:
        raise UserError(f"--top must be at least 1, not {arguments.top}")
    for file in (arguments.write, arguments.svg, arguments.json):
        if file:
            check_target(Path(file))
    share = MEMORY_SHARE if arguments.memory_share is None else arguments.memory_share
    cluster = load_cluster(Path(arguments.cluster)).without(lost(arguments.without))
    if len(cluster.nodes) > 1:
        return _plan_mixed(arguments, overrides, cluster, share)
    where = target(cluster, share)
    given = load_job(Path(arguments.job), overrides)
    job = _known(given)
    found = search(job, where, arguments.top, arguments.unvalidated)
    if not found.degrees:
        raise UserError("\n".join(["nothing may be answered for this job and cluster:", *left_out_lines(found)]))
    if not found.plans:
        raise UserError("\n".join([*misfit_lines(found, where), *left_out_lines(found)]))
    print(*plan_lines(found, where), sep="\n")
    best = found.plans[0]
    command = join(["equigrad", "train", arguments.job, *overrides, *words(changes(given, best.work))])
    print(f"\nthe best:  {command}")
    if arguments.write:
        write_text(Path(arguments.write), f"# {_label(best)}\n{dump_toml(planned(given, best))}")
    if arguments.svg:
        write_text(Path(arguments.svg), draw(planned(job, best), best, where))
    if arguments.json:
        write_json(Path(arguments.json), plan_record(found, where, given))
    return 0


def _plan_mixed(arguments: argparse.Namespace, overrides: Sequence[str], cluster: Cluster, share: float) -> int:
    """Plans for several kinds of nodes: printed, and not trained with."""
    if arguments.write or arguments.svg:
        raise UserError("--write and --svg are for nodes of one kind: training has no layout for several kinds yet")
    job = _known(load_job(Path(arguments.job), overrides))
    costs = Costs(job, {nodes.name: target_of(nodes, share) for nodes in cluster.nodes})
    machines = [where.machine for where in costs.kinds.values()]
    for quantity in QUANTITIES:
        permit(mixed(quantity, costs.base, machines, costs.gpus), arguments.unvalidated)
    found = search_mixed(Rule(costs), arguments.top)
    if not found.plans:
        raise UserError("\n".join(text.misfit_lines(costs)))
    print(*text.plan_lines(found, costs), sep="\n")
    print("\ntraining has no layout for several kinds of nodes yet: this is what it would be worth")
    if arguments.json:
        write_json(Path(arguments.json), text.record(found, costs))
    return 0


def lost(words: Sequence[str]) -> dict[str, int]:
    """Nodes by kind, of words like ``h100=1``. ``UserError`` for others."""
    found = {}
    for word in words:
        name, _, count = word.partition("=")
        if not name or not count.isdecimal():
            raise UserError(f"--without takes KIND=COUNT, such as h100=1, not {word!r}")
        found[name] = int(count)
    return found


def _known(given: Job) -> Job:
    job = resolve_weights(given)
    if job.model.vocab_size is None:
        raise UserError("the size of the vocabulary is not known yet; set model.vocab_size")
    return job


def _label(plan: Plan) -> str:
    return f"time: {plan.time.label}; memory: {plan.memory.label}"


def planned(job: Job, plan: Plan) -> Job:
    """The job with a plan's layout, checked as any job is."""
    tree = job.model_dump(exclude_none=True)
    for key, value in changes(job, plan.work).items():
        section, _, leaf = key.partition(".")
        tree[section][leaf] = value
    return Job.model_validate(tree)


def draw(job: Job, plan: Plan, where: Target) -> str:
    """A step of full samples with a plan's layout, as an SVG."""
    work = plan.work
    count = work.micro_batch * work.micro_batches * work.layout.data_lanes
    whole = [SampleRef(0, number, 0, work.sequence, work.sequence) for number in range(count)]
    name = f"{job.name}, predicted, {plan.state if plan.state == 'validated' else plan.state.upper()}"
    return draw_svg(replace(divide(job, whole, 1), timeline=timeline(plan, where), name=name))


def timeline(plan: Plan, where: Target) -> Simulation:
    """A plan's pipeline, played with the seconds that are predicted for each stage; messages are free."""
    work, layout = plan.work, plan.work.layout
    seconds = stage_seconds(work, where.machine, known=where.known)

    def cost(action: Action | StageAction) -> float:
        if not isinstance(action, Action):
            return 0.0
        forward, backward = seconds[action.stage]
        return {"forward": forward, "backward": backward}.get(action.kind, backward / 2)

    return simulate(pipeline(layout.pp_schedule, layout.pp, layout.pp_stages, work.micro_batches), cost)


def plan_record(found: Found, where: Target, job: Job) -> dict[str, Any]:
    """Everything that is printed as JSON values. Seconds, bytes."""
    return {
        "machine": where.machine,
        "gpus": where.gpus,
        "memory_bytes": where.memory,
        "changed": where.changed,
        "degrees": found.degrees,
        "left_out": dict(sorted(found.left_out.items())),
        "plans": [
            {
                "state": plan.state,
                "time": plan.time.label,
                "memory": plan.memory.label,
                "overrides": changes(job, plan.work),
                "seconds": plan.seconds,
                "seconds_by_part": dict(plan.time.value.parts),
                "bytes": plan.memory.value.total,
                "bytes_by_use": vars(plan.memory.value),
                "mfu": plan.mfu,
                "tokens_per_day": plan.tokens_per_day,
                "limit": plan.time.value.limit,
            }
            for plan in found.plans
        ],
    }


def record(line: Line) -> dict[str, Any]:
    """One line as JSON values."""
    return {"table": line.table, "quantity": line.quantity, "part": line.part} | line.errors._asdict()
