"""Traces, profiles and measured runs: what is read is what was meant, and what is wrong is told with its place."""

import csv
from pathlib import Path

import pytest

from equigrad.errors import UserError
from equigrad.plan.cluster.trace import Job, Profile, read_measured, read_profiles, read_trace
from tests.plan.cluster.cases import MEASURED, NETWORK, PROFILE, TRACE, write_files


def read(folder: Path, timing: str = "trace", **texts: str) -> list[Job]:
    paths = write_files(folder, **texts)
    jobs = read_trace(paths["trace"], read_profiles(paths["profile"], paths["network"]), timing)  # type: ignore[arg-type]
    read_measured(paths["measured"], jobs)
    return jobs


def test_the_trace_tells_how_long_and_the_profile_in_which_proportion(tmp_path: Path) -> None:
    """Job c: 230 s less 30 of loading are 2 s an iteration, twice those of the profile."""
    a, b, c = read(tmp_path)
    assert (c.name, c.workers, c.iterations, c.arrival_s) == ("c", 8, 100, 5.0)
    assert c.phases == Profile(1.0, 1.0, 30.0, 175.0)
    assert [job.alone_s for job in (a, b, c)] == pytest.approx([110.0, 95.0, 230.0])
    assert a.phases.volume_mb == 0.0


def test_a_duration_shorter_than_loading_leaves_iterations_to_the_profile(tmp_path: Path) -> None:
    (job,) = read(tmp_path, trace="job_id,model,arrival_time,duration,num_iteration,gpu_workers\na,bert,0,12,3,2\n",
                  measured="job_id,start_s,training_s\na,0,1\n")  # fmt: skip
    assert job.alone_s == pytest.approx(20 + 3 * 0.75)


def test_by_the_profile_durations_are_not_read(tmp_path: Path) -> None:
    jobs = read(tmp_path, "profile", trace=TRACE.replace("duration", "notes"))
    assert [job.alone_s for job in jobs] == pytest.approx([10 + 200 * 0.5, 20 + 100 * 0.75, 30 + 100 * 1.0])


def test_rows_and_columns_may_come_in_any_order(tmp_path: Path) -> None:
    rows = list(csv.DictReader(TRACE.splitlines()))
    columns = ["gpu_workers", "colour", "num_iteration", "duration", "arrival_time", "model", "job_id"]
    text = "\n".join([",".join(columns), *(",".join(row.get(c, "x") for c in columns) for row in reversed(rows))])
    moved = read(tmp_path, trace=text)
    plain = read(tmp_path)
    assert [(j.number, j.name, j.phases) for j in moved] == [(j.number, j.name, j.phases) for j in plain]


def test_jobs_that_arrive_together_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    names = ["job2", "10", "9", "job10"]
    trace = "job_id,model,arrival_time,duration,num_iteration,gpu_workers\n" + "".join(
        f"{name},bert,{0 if name != 'job2' else 1},50,3,2\n" for name in names
    )
    measured = "job_id,start_s,training_s\n" + "".join(f"{name},1,1\n" for name in names)
    assert [job.name for job in read(tmp_path, trace=trace, measured=measured)] == ["9", "10", "job10", "job2"]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("trace", ("num_iteration", "rounds"), "trace.csv:1: no column num_iteration; a trace has job_id, model"),
        ("trace", ("duration", "model"), "trace.csv:1: more than one column model"),
        ("trace", (TRACE, ""), "trace.csv:1: no column job_id"),
        ("trace", (TRACE[TRACE.index("a,") :], ""), "trace.csv: no jobs"),
        ("trace", ("a,bert,0", "a,bert,nan"), "trace.csv:2: arrival_time: nan is neither 0 nor from 1e-06 to 1e+10"),
        ("trace", ("a,bert,0", "a,bert,-1"), "trace.csv:2: arrival_time: -1 is neither 0 nor from"),
        ("trace", ("b,bert,5", "b,bert,inf"), "trace.csv:3: arrival_time: inf is neither 0 nor from"),
        ("trace", ("b,bert,5", "b,bert,soon"), "trace.csv:3: arrival_time: 'soon' is not a number"),
        ("trace", ("b,bert,5", "b,bert,"), "trace.csv:3: arrival_time: nothing is written there"),
        ("trace", ("110,200,1", "1e99,200,1"), "trace.csv:2: duration: 1e99 is neither 0 nor from"),
        ("trace", ("110,200,1", "110,0,1"), "trace.csv:2: num_iteration: 0 is not a whole number from 1 on"),
        ("trace", ("110,200,1", "110,2.5,1"), "trace.csv:2: num_iteration: 2.5 is not a whole number"),
        ("trace", ("110,200,1", "110,200,0"), "trace.csv:2: gpu_workers: 0 is not a whole number"),
        ("trace", ("110,200,1", "110,200,3"), "trace.csv:2: gpu_workers: no profile of bert on 3 workers; there is bert"
         " on 1, 2, 8"),
        ("trace", ("a,bert", "a,bart"), "trace.csv:2: model: no profile of bart on 1 workers"),
        ("trace", ("b,bert", "a,bert"), "trace.csv:3: job_id: a second row for a"),
        ("trace", ("a,bert", ",bert"), "trace.csv:2: job_id: nothing is written there"),
        ("trace", ("110,200,1", "110,200"), "trace.csv:2: 5 values for 6 columns"),
        ("trace", ("110,200,1", "110,200,1,1"), "trace.csv:2: 7 values for 6 columns"),
        ("trace", ("a,bert", '"a,bert'), "cannot read trace"),
        ("profile", ("loading_s", "load"), "profile.csv:1: no column loading_s; a profile has model, workers"),
        ("profile", ("bert,2,0.5,0.25", "bert,2,nan,0.25"), "profile.csv:3: compute_s: nan is neither 0 nor from"),
        ("profile", ("bert,2,0.5,0.25", "bert,2,0.5,-1"), "profile.csv:3: network_s: -1 is neither 0 nor from"),
        ("profile", ("bert,2,0.5,0.25", "bert,2,0.5,0"), "profile.csv:3: network_s: 0 seconds for the 100 MB"),
        ("profile", ("bert,1,0.5", "bert,1,0"), "profile.csv:2: compute_s: an iteration that takes no time at all"),
        ("profile", ("bert,8,", "bert,2,"), "profile.csv:4: model: a second row for bert on 2 workers"),
        ("network", ("bert,8", "bert,4"), "profile.csv:4: workers: "),
        ("network", ("bert,8", "bert,2"), "network.csv:3: model: a second row for bert on 2 workers"),
        ("network", ("100,175", "100,-5"), "network.csv:3: volume_mb: -5 is neither 0 nor from"),
        ("measured", ("c,7,200\n", ""), "measured.csv: job_id: no row for job c ("),
        ("measured", ("c,7,200", "c,7,200\nd,1,1"), "measured.csv: job_id: d is no job of the trace"),
        ("measured", ("c,7,200", "c,7,200\nc,1,1"), "measured.csv:5: job_id: a second row for c"),
        ("measured", ("c,7,200", "c,1,3"), "measured.csv:4: start_s: job c ends at 4, but arrives at 5"),
        ("measured", ("c,7,200", "c,7,0"), "measured.csv:4: training_s: 0 is not more than 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_file_line_and_column(
    file: str, change: tuple[str, str], message: str, tmp_path: Path
) -> None:
    text = {"trace": TRACE, "profile": PROFILE, "network": NETWORK, "measured": MEASURED}[file]
    assert change[0] in text
    with pytest.raises(UserError) as error:
        read(tmp_path, **{file: text.replace(*change)})
    assert message in str(error.value)


def test_a_worker_with_several_devices_is_refused(tmp_path: Path) -> None:
    lines = TRACE.splitlines()
    trace = "\n".join([f"{lines[0]},gpu_per_worker", *(f"{line},2" for line in lines[1:])])
    with pytest.raises(UserError, match=r"trace.csv:2: gpu_per_worker: 2, but a worker has one device"):
        read(tmp_path, trace=trace)


def test_what_is_no_file_or_no_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no trace at"):
        read_trace(tmp_path / "none.csv", {})
    with pytest.raises(UserError, match="cannot read trace"):
        read_trace(tmp_path, {})
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot read trace"):
        read_trace(tmp_path / "bytes.csv", {})
