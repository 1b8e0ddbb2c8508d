"""Gates: what may be answered follows from held-out runs alone."""

from dataclasses import replace
from typing import Any

import pytest

from equigrad.config.layout import Layout
from equigrad.plan import gates
from equigrad.plan.calibrate import calibration_runs, fit
from equigrad.plan.calibration import calibration
from equigrad.plan.gates import (
    LEAST_RUNS,
    MEAN,
    WORST,
    Unvalidated,
    Withdrawn,
    ask_memory,
    ask_step,
    capability,
    doubts,
    evidence,
    permit,
    state,
)
from equigrad.plan.published import CALIBRATES, runs
from equigrad.plan.shape import Shape
from equigrad.plan.step import step
from equigrad.plan.validation import Errors, assumed, by_table, error
from equigrad.plan.workload import FSDP_PURE, Workload

SEVEN = Shape.gpt(4096, 32, 32, 50368, 2048)
WORK = Workload(SEVEN, 2048, 4, 1, Layout(dp_shard=16, reduce_every_round=True), FSDP_PURE)


def test_no_run_both_calibrates_and_tests() -> None:
    for run in runs():
        of_split = run.name.split()[0] in CALIBRATES and run.table in ("llm-foundry A100", "llm-foundry H100")
        assert (run.part == "calibration") == of_split
    assert sum(run.part == "held out" for run in runs()) > len(runs()) / 2


def test_a_state_is_what_its_held_out_runs_make_it() -> None:
    for which in evidence() | doubts():
        own = [r for r in runs() if r.part == "held out" and capability(which.quantity, r.work, r.machine) == which]
        own = [run for run in own if which.quantity == "throughput" or run.memory]
        out_of_bounds = []
        for found, on_assumptions in ((evidence(), False), (doubts(), True)):
            wrong = [abs(error(r, which.quantity)) for r in own if assumed(r, which.quantity) == on_assumptions]
            assert (which in found) == bool(wrong)
            if wrong:
                assert found[which].runs == len(wrong)
                assert found[which].mean == pytest.approx(sum(wrong) / len(wrong))
                enough = len(wrong) >= LEAST_RUNS
                out_of_bounds.append(max(wrong) > WORST or (enough and sum(wrong) / len(wrong) > MEAN))
        if any(out_of_bounds):
            assert state(which) == "withdrawn"
        else:
            assert state(which) == ("validated" if which in evidence() and evidence()[which].runs >= LEAST_RUNS else
                                    "unvalidated")  # fmt: skip


def test_what_was_assumed_contradicts_but_neither_confirms_nor_calibrates() -> None:
    assert not any(assumed(run, "throughput") for run in calibration_runs())
    which = capability("throughput", WORK, "dgx_h100")._replace(technique="none that exists")
    for wrong, expected in ((0.01, "unvalidated"), (0.3, "withdrawn")):
        found = {which: Errors(9, wrong, wrong, wrong, "mpt-0b")}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gates, "doubts", lambda found=found: found)
            assert state(which) == expected


def test_a_run_rests_on_the_assumed_constants_of_its_machine_in_its_time_alone() -> None:
    run = next(run for run in runs() if run.machine == "grand_teton_h100")
    assert assumed(run, "throughput")
    assert not assumed(run, "memory")
    assert assumed(run._replace(assumed="half precision"), "memory")
    assert not assumed(run._replace(machine="dgx_h100"), "throughput")


def test_a_validated_answer_carries_its_errors() -> None:
    answer = ask_step(WORK, "dgx_h100")
    assert answer.state == "validated"
    assert answer.value == step(WORK, "dgx_h100")
    assert "held-out runs" in answer.label


def test_a_withdrawn_capability_raises_whatever_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    which = capability("throughput", WORK, "a100_40gb_roce")
    bad = {which: Errors(5, 0.3, 0.5, 0.3, "mpt-0b")}
    monkeypatch.setattr(gates, "evidence", lambda: bad)
    for unvalidated in (False, True):
        with pytest.raises(Withdrawn, match=r"withdrawn: throughput on A100, sharded.*30\.0%.*50\.0%.*mpt-0b"):
            ask_step(WORK, "a100_40gb_roce", unvalidated)


def test_the_withdrawn_capabilities_of_today_raise() -> None:
    withdrawn = [which for which in evidence() | doubts() if state(which) == "withdrawn"]
    for which in withdrawn:
        with pytest.raises(Withdrawn):
            permit(which, unvalidated=True)


@pytest.mark.parametrize("change", [{"offload": True}, {"layout": Layout(cp=8)}], ids=["offload", "context"])
def test_what_nothing_tests_is_answered_only_on_request_and_labelled(change: dict[str, Any]) -> None:
    for ask in (ask_step, ask_memory):
        with pytest.raises(Unvalidated, match="--unvalidated"):
            ask(replace(WORK, **change), "dgx_h100")
        assert ask(replace(WORK, **change), "dgx_h100", unvalidated=True).label.startswith("UNVALIDATED")


def test_what_was_tested_on_few_gpus_is_not_taken_to_hold_on_many() -> None:
    ask_step(WORK, "dgx_h100")
    with pytest.raises(Unvalidated, match="up to 4096 GPUs"):
        ask_step(replace(WORK, layout=WORK.layout.model_copy(update={"dp_shard": 4096})), "dgx_h100")


def test_one_run_can_contradict_but_not_confirm() -> None:
    which = capability("throughput", WORK, "dgx_h100")._replace(technique="none that exists")
    for wrong, expected in ((0.05, "unvalidated"), (0.3, "withdrawn")):
        found = {which: Errors(1, wrong, wrong, wrong, "mpt-0b")}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gates, "evidence", lambda found=found: found)
            assert state(which) == expected


def test_dense_models_are_within_the_bounds_where_they_are_held_out() -> None:
    lines = {(line.table, line.quantity, line.part): line.errors for line in by_table()}
    for table in ("llm-foundry A100", "llm-foundry H100"):
        errors = lines[table, "throughput", "held out"]
        assert errors.mean <= MEAN
        assert errors.worst <= WORST


def test_the_calibration_is_the_least_squares_fit_of_its_runs() -> None:
    kept, again = calibration(), fit(calibration_runs(), "a test")
    for name in ("product", "operands", "link"):
        assert getattr(kept, name).value == pytest.approx(getattr(again, name).value, rel=0.01), name
