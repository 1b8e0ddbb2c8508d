"""The loop of reinforcement learning: what a step is made of, and that neither layout nor interruption changes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equigrad.build import build_replica
from equigrad.checkpoint.folder import latest
from equigrad.config import Job
from equigrad.data.stream import Batch
from equigrad.data.tokenizers import byte_tokenizer
from equigrad.errors import UserError
from equigrad.parallel.stop import StopRequest
from equigrad.rl.engine.embedded import EmbeddedEngine, Limits
from equigrad.rl.engine.server import Server
from equigrad.rl.engine.service import Service
from equigrad.rl.problems import ProblemStream
from equigrad.rl.trainer import PolicyTrainer
from tests.exact_runs import EXACT
from tests.jobs import Records, command, pool_world, summary, tiny_job, whole_parameters
from tests.workers import Workers

RL: dict[str, Any] = {
    "data__context": 20, "batch__row_tokens": 40, "train__steps": 4, "checkpoint__every": 1,
    "model__initializer_range": 0.2, "rl__task": "arithmetic", "rl__prompts": 3, "rl__group_size": 4,
    "rl__longest": 5, "rl__slots": 5, "rl__held_out": 6, "rl__warmup__steps": 2, "rl__warmup__problems": 7,
    "rl__warmup__batch": 5,
}  # fmt: skip


class Kept(PolicyTrainer):
    """Keeps the samples of its steps, whole."""

    def next_batch(self, stop: StopRequest) -> Batch:
        batch = super().next_batch(stop)
        self.samples = [dict(self.stream.read(ref).streams) for ref in batch.samples]
        return batch


CUT = {"rl__task": "sequences", "data__context": 40, "rl__longest": 1}
"""Answers of one token, which is too few."""


def rl_trainer(job: Job, folder: Path) -> Kept:
    world = pool_world(job)
    trainer = Kept(job, folder, world, ProblemStream(job, byte_tokenizer(), world))
    trainer.initialize(job.seed)
    return trainer


def run(layout: dict[str, Any], folder: Path, steps: int = 4, **changes: Any) -> dict[str, Any]:
    """What the steps of a job leave on this rank; ``steps`` where it begins anew or is resumed."""
    job = tiny_job(**RL | {"train__steps": steps} | {f"layout__{k}": v for k, v in layout.items()} | changes)
    trainer, records = rl_trainer(job, folder), Records()
    if (checkpoint := latest(folder / "checkpoints")) is not None:
        trainer.resume(checkpoint)
    trainer.run(records, StopRequest())
    keys = ("step", "loss", "grad_norm", "tokens", "reward", "logprob_diff", "logprob_diff_max", "clip_share")
    figures = [{key: float(r[key]).hex() for key in keys if key in r} for r in records.steps]
    samples = [{n: s.tobytes() for n, s in streams.items()} for streams in trainer.samples]
    return {
        "figures": figures, "samples": samples, "parameters": whole_parameters(trainer),
        "held_out": trainer.evaluate(records).reward, "cursor": trainer.stream.cursor(),
    }  # fmt: skip


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["figures"] == expected["figures"]
    assert found["samples"] == expected["samples"]
    assert (found["held_out"], found["cursor"]) == (expected["held_out"], expected["cursor"])
    for name, whole in expected["parameters"].items():
        assert torch.equal(found["parameters"][name], whole), name


LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"dp_shard": 2}, {}),
    ({"cp": 2}, {}),
    ({"tp": 2}, {"rl__tp": 2}),
    ({"pp": 2}, {"rl__tp": 2}),
]
KL = {"rl__policy__kl": 0.05}
FORMAT = {"rl__task": "format", "data__context": 90, "batch__row_tokens": 90}
"""Partial rewards: something to learn from early on."""


@pytest.mark.parametrize(("layout", "changes"), LAYOUTS, ids=["dp2", "cp2", "tp2", "pp2"])
def test_exact_steps_have_the_same_bits_on_every_layout_sampled_tokens_included(
    layout: dict[str, Any], changes: dict[str, Any], workers: Callable[[int], Workers], tmp_path: Path
) -> None:
    more = EXACT | KL | {"rl__require_updates": True}
    expected = run({}, tmp_path / "alone", **more)
    for found in workers(2).run(run, layout, tmp_path / "together", **more, **changes):
        same(found, expected)
    # What was sampled is what is trained, byte by byte.
    assert all(r["logprob_diff_max"] == (0.0).hex() for r in expected["figures"][2:])
    assert len({len(s["ids"]) for s in expected["samples"]}) > 1


def test_a_run_that_is_resumed_goes_on_in_the_same_bits(tmp_path: Path) -> None:
    expected = run({}, tmp_path / "whole", 5, **KL)
    for until in (1, 3, 5):  # in the warm-up, and after it, where a reference is kept
        found = run({}, tmp_path / "parts", until, optim__schedule_steps=3, **KL)
    expected["figures"] = expected["figures"][3:]
    same(found, expected)


@pytest.mark.parametrize("name", ["gspo", "cispo", "rloo", "reinforce_pp"])
def test_every_algorithm_trains(name: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"rl__policy__name": name, "rl__policy__correction": "truncate"}
    trainer = rl_trainer(tiny_job(**RL | changes | FORMAT), tmp_path)
    records = Records()
    trainer.run(records, StopRequest())
    assert all(np.isfinite(r["loss"]) for r in records.steps)
    assert records.steps[-1]["clip_share"] == 0  # on policy nothing is far from where it was
    assert records.steps[-1]["logprob_diff_max"] < 1e-4
    assert trainer.stream.next == 7 + 2 * 3


def test_truncated_answers_still_feel_the_reference(tmp_path: Path) -> None:
    """All attempts are cut off and get no reward: advantages are zero, and the divergence alone has a gradient, from
    the second step of the policy on, where it is no longer the reference."""
    job = tiny_job(**RL | CUT | {"rl__policy__kl": 0.01, "train__steps": 5, "optim__lr": 0.1})
    trainer, records = rl_trainer(job, tmp_path), Records()
    trainer.run(records, StopRequest())
    first, *rest = records.steps[2:]
    assert all(r["truncated"] == r["zero_spread"] == 1 and r["policy_loss"] == 0 for r in (first, *rest))
    assert first["kl_loss"] == pytest.approx(0, abs=1e-6)
    assert all(r["kl_loss"] > 0 and r["grad_norm"] > 0 for r in rest)


def test_what_teaches_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rl_trainer(tiny_job(**RL | CUT), tmp_path).run(Records(), StopRequest())
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == ["warning, step 3"] * 2  # and not at every step
    assert "100% of the answers were cut off" in told[0]
    assert "in 100% of the groups all rewards are the same (mean 0)" in told[1]


def test_groups_that_teach_nothing_are_drawn_again(tmp_path: Path) -> None:
    job = tiny_job(**RL | FORMAT | {"rl__redraws": 3, "train__steps": 3})
    trainer, records = rl_trainer(job, tmp_path), Records()
    trainer.run(records, StopRequest())
    record, drawn = records.steps[-1], trainer.stream.next - 7
    assert 3 <= drawn <= 12
    if drawn == 12:
        assert record["zero_spread"] > 0
    advantages = [
        np.frombuffer(s["advantage"]) for s in ({n: x.tobytes() for n, x in s.items()} for s in trainer.samples)
    ]
    assert drawn == 12 or all(a.any() for a in advantages)


def test_failed_verdicts_are_in_no_group_and_counted(tmp_path: Path) -> None:
    task = tmp_path / "odd.py"
    task.write_text(
        "from equigrad.rl.tasks import Draw, Question, Task\n\n\nclass Odd(Task):\n"
        "    def draw(self, draw, level):\n        return Question(f'{draw.below(99)}?', {})\n\n"
        "    def verify(self, conversation):\n        return 1.0 / (sum(map(ord, conversation.completion)) % 2)\n"
    )
    job = tiny_job(**RL | {"rl__task": f"{task}:Odd", "rl__warmup__steps": 0, "train__steps": 1})
    trainer, records = rl_trainer(job, tmp_path / "run"), Records()
    trainer.run(records, StopRequest())
    (record,) = records.steps
    assert 0 < record["failed_verdicts"] < 12
    assert len(trainer.samples) == 12 - record["failed_verdicts"]
    assert record["reward"] == 1.0
    trainer.stream.close()


def test_without_any_verdict_the_run_stops_with_the_reason_and_keeps_its_state(tmp_path: Path) -> None:
    task = tmp_path / "bad.py"
    task.write_text(
        "from equigrad.rl.tasks import Question, Task\n\n\nclass Bad(Task):\n"
        "    def draw(self, draw, level):\n        return Question(f'{draw.below(99)}?', {})\n\n"
        "    def verify(self, conversation):\n        raise ValueError('no idea')\n"
    )
    job = tiny_job(**RL | {"rl__task": f"{task}:Bad", "rl__warmup__steps": 0})
    trainer = rl_trainer(job, tmp_path / "run")
    before = trainer.stream.cursor()
    with pytest.raises(UserError, match=r"no attempt has a verdict; 12 times: .*ValueError: no idea"):
        trainer.run(Records(), StopRequest())
    assert trainer.stream.cursor() == before
    trainer.stream.close()


@pytest.mark.parametrize("kl", [0.0, 0.05])
def test_a_stop_during_sampling_leaves_the_step_for_the_resumed_run(kl: float, tmp_path: Path) -> None:
    job = tiny_job(**RL | {"rl__policy__kl": kl, "checkpoint__every": 0})
    trainer, stop, records = rl_trainer(job, tmp_path), StopRequest(), Records()
    make = trainer.stream.attempts.make

    def stopped(*given: Any, **more: Any) -> Any:
        stop.asked = True
        return make(*given, **more)

    trainer.stream.attempts.make = stopped  # type: ignore[method-assign]
    assert not trainer.run(records, stop)
    assert [r["step"] for r in records.steps] == [1, 2]
    assert trainer.stream.cursor()["step"] == 2
    again = rl_trainer(job, tmp_path)
    again.resume(latest(tmp_path / "checkpoints"))  # type: ignore[arg-type]
    again.run(records, StopRequest())
    assert [r["step"] for r in records.steps] == [1, 2, 3, 4]


def test_a_run_cannot_go_on_with_other_problems(tmp_path: Path) -> None:
    trainer = rl_trainer(tiny_job(**RL | {"train__steps": 1}), tmp_path)
    trainer.run(Records(), StopRequest())
    other = rl_trainer(tiny_job(**RL | {"rl__arithmetic": {"below": [9]}}), tmp_path)
    with pytest.raises(UserError, match="the problems are not those the run was trained on"):
        other.resume(latest(tmp_path / "checkpoints"))  # type: ignore[arg-type]


def test_weights_that_did_not_arrive_end_the_run(workers: Callable[[int], Workers], tmp_path: Path) -> None:
    for error in workers(2).run(with_stale_weights, tmp_path):
        assert "rl.require_updates: of version 2" in error
        assert "is not what was trained" in error


def with_stale_weights(folder: Path) -> str:
    job = tiny_job(**RL | {"rl__require_updates": True, "layout__dp_shard": 2})
    trainer = rl_trainer(job, folder)
    engine = trainer._sampler._engine
    assert engine is not None
    engine.load = lambda weights, version: [setattr(engine, "_version", version), list(weights)]  # type: ignore
    with pytest.raises(UserError) as caught:
        trainer.run(Records(), StopRequest())
    return str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sampling_on_a_server_changes_no_bit(ranks: int, workers: Callable[[int], Workers], tmp_path: Path) -> None:
    """Adapters are merged on their way, so this is of a model without."""
    expected = run({}, tmp_path / "here", **EXACT)
    job = tiny_job(**RL | EXACT)
    model = build_replica(job, torch.device("cpu"))
    engine = EmbeddedEngine(model, Limits(3, 20), dict(model.named_parameters()), decode=byte_tokenizer().decode)
    with Service(engine) as service:
        server = Server(service, job.model, byte_tokenizer(), 20, "tiny", "127.0.0.1", 0)
        with server.running() as url:
            there = EXACT | {"rl__servers": {"urls": [url], "weights": str(tmp_path / "weights")}}
            if ranks == 1:
                same(run({}, tmp_path / "there", **there), expected)
            else:
                for found in workers(2).run(run, {"dp_shard": 2}, tmp_path / "there", **there):
                    same(found, expected)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["version-00000003", "version-00000004"]


def test_a_server_that_goes_away_ends_the_run_with_one_message_and_its_state(tmp_path: Path) -> None:
    servers = {"urls": ["http://127.0.0.1:9"], "weights": str(tmp_path / "weights")}
    trainer, records = rl_trainer(tiny_job(**RL | {"rl__servers": servers}), tmp_path / "run"), Records()
    with pytest.raises(UserError, match=r"http://127.0.0.1:9 does not take the weights of version 2: no answer"):
        trainer.run(records, StopRequest())
    assert [r["step"] for r in records.steps] == [1, 2]
    assert latest(tmp_path / "run" / "checkpoints") is not None
    assert trainer.stream.cursor()["step"] == 2


def test_a_job_of_reinforcement_learning_from_the_command_line(tmp_path: Path) -> None:
    changes = {"rl__task": "sequences", "data__context": 40, "rl__held_out": 4, "layout__dp_shard": 2}
    words = [f"--{key.replace('__', '.')}={value}" for key, value in (RL | changes).items()]
    words += [
        "--data.tokenizer.kind=bytes",
        "--model.hidden_size=48",
        "--model.num_hidden_layers=2",
        "--batch.tokens=none",
    ]
    done = command("train", "--run", tmp_path / "run", *words)
    assert done.returncode == 0, done.stderr
    assert "held-out problems: mean reward" in done.stdout
    assert summary(tmp_path / "run")["held_out_problems"] == 4
    resumed = command("train", "--run", tmp_path / "run", "--resume", "--train.steps=5")
    assert resumed.returncode == 0, resumed.stderr
    assert summary(tmp_path / "run")["steps"] == 5
