"""The training loop of reinforcement learning: problems -> attempts -> rewards -> samples -> a step like any other.

The main rank asks the tasks and keeps the conversations; all ranks sample and train.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equigrad.build import build_parts
from equigrad.checkpoint.manifest import read_manifest
from equigrad.config import Job
from equigrad.data.samples import Sample
from equigrad.data.shuffle import Permutation
from equigrad.data.stream import Batch, Batches
from equigrad.errors import UserError
from equigrad.execution import Execution
from equigrad.optim.schedule import learning_rate
from equigrad.parallel.placement import Placed
from equigrad.parallel.ranks import gather
from equigrad.parallel.stop import StopRequest
from equigrad.parallel.world import World
from equigrad.rl.algorithms import algorithm
from equigrad.rl.attempts import Ask, Attempt
from equigrad.rl.batch import imitated, objective, samples
from equigrad.rl.colocated import Colocated
from equigrad.rl.figures import Warnings, by_problem, figures, has_spread, reasons
from equigrad.rl.problems import ProblemStream
from equigrad.rl.remote import Remote
from equigrad.rl.rollouts import Rollout, mean
from equigrad.rl.sampler import Sampler
from equigrad.rl.samples import Samples, plain
from equigrad.rl.shown import records
from equigrad.rl.tasks.curriculum import State
from equigrad.schedule.division import schedule_samples
from equigrad.trainer import Observer, Trainer

_REFERENCE = "reference."


@dataclass(frozen=True)
class Rewards:
    """What held-out problems gave, each tried once with the most likely tokens.

    solved: share of them whose reward was 1 or more
    """

    reward: float
    solved: float
    problems: int
    facts: dict[str, float]

    def record(self) -> dict[str, float]:
        """With the names that metrics and summaries use."""
        named = {"held_out_reward": self.reward, "held_out_solved": self.solved, "held_out_problems": self.problems}
        return named | {f"held_out_{name}": value for name, value in self.facts.items() if "/" in name}

    def summary(self) -> dict[str, float]:
        """The same."""
        return self.record()


@dataclass(frozen=True)
class _Rolled:
    """What all ranks are told of a step's attempts."""

    rollouts: list[Rollout]
    facts: dict[str, float]
    following: int
    curriculum: State


class PolicyTrainer(Trainer):
    """A run of reinforcement learning on this rank. Beside a trainer's state there is the reference model's, once the
    policy diverges from it: the weights after the warm-up."""

    stream: ProblemStream

    def __init__(self, job: Job, folder: Path, world: World, stream: Batches) -> None:
        assert job.rl is not None
        assert isinstance(stream, ProblemStream)
        self.config = job.rl
        self._algorithm = algorithm(job.rl.policy)
        imitates = bool(job.rl.warmup.steps or job.rl.warmup.keep)
        super().__init__(job, folder, world, stream, objective(self._algorithm, float(imitates)))
        self._sampler: Sampler
        if job.rl.servers is not None:
            self._sampler = Remote(job, world, self.parameters, job.rl.servers)
        else:
            self._sampler = Colocated(job, world, self.parts, self.parameters, stream.tokenizer)
        self._warnings = Warnings()
        self._solutions: list[Sample] = []
        self._reference: dict[str, Placed] = {}
        self._scorer: Execution | None = None
        self._made: dict[str, Attempt] = {}  # on the main rank, those of the last step by their ids

    def next_batch(self, stop: StopRequest) -> Batch:
        """Attempts at the next problems, as samples; in the warm-up, solutions."""
        step, config = self.stream.step + 1, self.config
        if step <= config.warmup.steps:
            made = imitated(self._imitate(step), 1.0, self.objective.streams)
            return self.stream.take(made, step, self.stream.next, self.stream.curriculum)
        if config.policy.kl and not self._reference:
            self._keep_reference()
        began = time.perf_counter()
        self._sampler.update(self.step)
        synced = time.perf_counter()
        rolled = self._sampler.run(self._roll, stop)
        sampled = time.perf_counter()
        made = self._samples(rolled.rollouts, self._imitate(step) if config.warmup.keep else ())
        seconds = {"sync_seconds": synced - began, "rollout_seconds": sampled - synced}
        seconds["score_seconds"] = time.perf_counter() - sampled
        batch = self.stream.take(made, step, rolled.following, rolled.curriculum)
        first = step == config.warmup.steps + 1
        self.shown = self._show(step, rolled.rollouts, made) if first or step % config.shown_every == 0 else ()
        return replace(batch, temperature=config.temperature, facts=rolled.facts | seconds)

    def learning_rate(self) -> float:
        """The schedule is the policy's; before that the warm-up has a rate of its own."""
        warmup, optim, steps = self.config.warmup, self.job.optim, self.job.train.steps
        if self.step >= warmup.steps:
            return learning_rate(optim, self.step - warmup.steps, steps - warmup.steps)
        return (warmup.lr or optim.lr) * min((self.step + 1) / max(optim.warmup_steps, 1), 1.0)

    def _roll(self, ask: Ask) -> _Rolled:
        """On the main rank."""
        attempts, config, state = self.stream.attempts, self.config, self.stream.curriculum
        tasks = attempts.tasks
        made, kept, following = list[Attempt](), list[list[Attempt]](), self.stream.next
        for _ in range(1 + config.redraws):
            numbers = range(following, following + config.prompts - len(kept))
            following = numbers.stop
            problems = [tasks.problem(number, state) for number in numbers]
            drawn = attempts.make(problems, config.group_size, self.step, ask)
            made += drawn
            kept += [group for group in by_problem(drawn).values() if not config.redraws or has_spread(group)]
            if len(kept) == config.prompts:
                break
        kept = kept or list(by_problem(made).values())[: config.prompts]
        if not kept:
            raise UserError(f"step {self.step + 1}: no attempt has a verdict; {reasons(made)}")
        facts = figures(made, self.step)
        for warning in self._warnings(facts):
            print(f"warning, step {self.step + 1}: {warning}", file=sys.stderr, flush=True)
        rollouts = [attempt.rollout() for group in kept for attempt in group]
        facts["dropped_tokens"] = sum(rollout.dropped for rollout in rollouts)
        facts |= {f"level/{name}": standing["level"] for name, standing in state.items() if tasks.levels[name] > 1}
        self._made = {attempt.id: attempt for attempt in made}
        after = tasks.advance(state, [(attempt.problem, attempt.verdict) for attempt in made if attempt.verdict])
        return _Rolled(rollouts, facts, following, after)

    def _show(self, step: int, rollouts: Sequence[Rollout], made: Samples) -> list[dict[str, Any]]:
        """Some groups for people to read, on the main rank; a collective."""
        names = list(dict.fromkeys(rollout.group for rollout in rollouts))[: self.config.shown]
        chosen = [rollout for rollout in rollouts if rollout.group in names]
        if not chosen:
            return []
        trained, samples = self._scores(self.execution, chosen), iter(made.samples)  # these groups are the first
        advantages = [
            [next(samples).streams["advantage"] if s.learned.any() else s.logprob for s in rollout.segments]
            for rollout in chosen
        ]
        if not self.world.is_main:
            return []
        return records(step, self._made, chosen, advantages, trained, self.stream.tokenizer)

    def _imitate(self, step: int) -> list[Sample]:
        """The solutions of a step: every epoch has all of them, in an order of its own."""
        warmup = self.config.warmup
        if not self._solutions:

            def solve() -> list[Sample]:
                attempts = self.stream.attempts
                state = attempts.tasks.begin()
                problems = [attempts.tasks.problem(number, state) for number in range(warmup.problems)]
                return [sample for problem in problems for sample in attempts.solved(problem)]

            self._solutions = gather(self.world.run_where(self.world.is_main, solve))[0]
        count = len(self._solutions)
        places = np.arange((step - 1) * warmup.batch, step * warmup.batch)
        orders = {epoch: Permutation(count, self.job.seed, epoch) for epoch in set((places // count).tolist())}
        return [self._solutions[int(orders[p // count](np.array([p % count]))[0])] for p in places.tolist()]

    def _samples(self, rollouts: Sequence[Rollout], beside: Sequence[Sample]) -> Samples:
        """The step's samples, with all that their losses read."""
        corrects = self.config.policy.correction != "none"
        now = self._scores(self.execution, rollouts) if corrects or self._algorithm.of_sequences else None
        reference = None if self._scorer is None else self._scores(self._scorer, rollouts)
        old = now if corrects else None
        made = samples(rollouts, self._algorithm, old, now, reference, None, beside, self.config.warmup.keep)
        return made.reading(self.objective.streams)

    def _scores(self, execution: Execution, rollouts: Sequence[Rollout]) -> list[list[np.ndarray]]:
        """What a model thinks of every token, by rollout and segment."""
        given = plain(rollouts)
        batch, model = self.job.batch, self.job.model
        schedule = schedule_samples(given.refs, model, self.world.lanes, batch.row_tokens, batch.packing)
        found = iter(execution.score(given, given.refs, schedule, self.config.temperature))
        return [[next(found) if s.learned.any() else s.logprob for s in rollout.segments] for rollout in rollouts]

    def _keep_reference(self) -> None:
        """The present weights, to be compared with from now on."""
        parts = build_parts(self.job, self.world)
        placed = {name: tensor for part in parts.values() for name, tensor in part.placed().items()}
        with torch.no_grad():
            for name, own in placed.items():
                own.tensor.copy_(self.parameters[name].tensor)
        self._reference = {f"{_REFERENCE}{name}": own.renamed(f"{_REFERENCE}{name}") for name, own in placed.items()}
        self._scorer = Execution(self.job, self.world, parts)

    def state(self) -> dict[str, Placed]:
        # Until a step has used it, it is what it is made of: the present weights.
        return super().state() | (self._reference if self.step > self.config.warmup.steps else {})

    def resume(self, checkpoint: Path) -> None:
        self.step = read_manifest(checkpoint).meta["step"]
        if self.config.policy.kl and self.step > self.config.warmup.steps:
            self._keep_reference()
        super().resume(checkpoint)

    def evaluate(self, observer: Observer, max_tokens: int | None = None, stop: StopRequest | None = None) -> Rewards:
        """What the model makes of held-out problems. Raises ``Stopped``, on all ranks, where one was asked to."""
        observer.evaluating()
        self._sampler.update(self.step)

        def judge(ask: Ask) -> Rewards:
            attempts, state = self.stream.attempts, self.stream.curriculum
            problems = [attempts.tasks.problem(n, state, "held_out") for n in range(self.config.held_out)]
            made = attempts.make(problems, 1, self.step, ask, greedy=True)
            rewards = [
                a.verdict.reward for a in made if a.verdict and not a.verdict.failed
            ]  # of answers, not of lengths
            if not rewards:
                raise UserError(f"no held-out attempt has a verdict; {reasons(made)}")
            solved = mean([reward >= 1 for reward in rewards])
            return Rewards(mean(rewards), solved, len(rewards), figures(made, self.step))

        result = self._sampler.run(judge, stop or StopRequest())
        observer.evaluation(self.step, result)
        return result
