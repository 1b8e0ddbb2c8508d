"""The report in a real browser: what it shows is what was logged, at a desk and on a phone, and nothing is fetched.

Where no Chromium or Chrome with its driver is found these tests are skipped, but under ``CI=true`` they fail.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from equigrad.observe.metrics import read_metrics
from equigrad.observe.report import write_report
from tests.observe.runs import DIGEST, group_record, policy_figures, write_rollouts, write_run

SIZES = {"desk": (1280, 800), "phone": (390, 844)}
STEPS, EVAL_EVERY, BAD, SPIKE = 200, 50, 120, 80
CURVES = {
    "loss": 199,
    "loss_smooth": 199,
    "held_out_loss": 4,
    "lr": 200,
    "grad_norm": 199,
    "grad_norm_smooth": 199,
    "tokens_per_second": 200,
}
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --disable-dev-shm-usage"
)


def unavailable(what: str) -> NoReturn:
    """No browser is a reason to skip on a laptop, and a fault of the set-up in CI."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must run the browser tests, but there is no {what}")
    pytest.skip(f"the report's browser tests need {what}")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    try:
        from selenium.webdriver import Chrome, ChromeOptions, ChromeService
    except ImportError:
        unavailable("selenium (pip install 'equigrad[test]')")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    binary = next(filter(None, map(shutil.which, names)), None) or unavailable("Chromium or Chrome")
    # The driver's path is given, so that selenium never downloads one.
    driver = shutil.which("chromedriver") or unavailable("chromedriver")
    options = ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = Chrome(options=options, service=ChromeService(driver))
    yield chrome
    chrome.quit()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {BAD: {"loss": math.nan, "grad_norm": math.inf}, SPIKE: {"loss": 9.5, "grad_norm": 30.0}}
    folder = tmp_path_factory.mktemp("runs") / ("a-name-that-is-much-too-long-for-any-phone" * 2)
    sample = {"prompt": "Call me", "text": " Ishmael." + " long" * 30 + "word" * 100 + "\x00\u202e<b>鯨"}
    write_run(folder, STEPS, EVAL_EVERY, changes, sample=sample)
    write_report(folder)
    return folder


def open_report(browser: Any, folder: Path, size: str = "desk") -> None:
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get((folder / "report.html").as_uri())


def find(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def hover(browser: Any, chart: str, share: float) -> None:
    """Move the mouse to a share of a chart's width."""
    from selenium.webdriver import ActionChains

    plot = find(browser, f"#{chart} .plot")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    offset = round(plot.size["width"] * (share - 0.5))
    ActionChains(browser, duration=0).move_to_element_with_offset(plot, offset, 0).perform()


def readout(browser: Any, curve: str) -> str:
    return find(browser, f"b[data-curve={curve}]").text


def shown_step(browser: Any, chart: str = "loss") -> int:
    return int(find(browser, f"#{chart} .at").text.removeprefix("step ").replace(",", ""))


@pytest.mark.parametrize("size", SIZES)
def test_it_fits_the_window_without_errors_or_requests(browser: Any, run: Path, size: str) -> None:
    open_report(browser, run, size)
    find(browser, "summary").click()
    for chart in ("loss", "lr", "grad_norm", "speed"):
        hover(browser, chart, 0.5)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    report = (run / "report.html").as_uri()
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    fetched = {
        r["request"]["url"] for r in requests if r["documentURL"] == report
    }  # not those of the browser's own page
    assert {report} <= fetched <= {report, "data:,"}
    columns = browser.execute_script("return getComputedStyle(document.querySelector('main')).gridTemplateColumns")
    assert len(columns.split()) == (3 if size == "desk" else 1)
    if size == "desk":  # figures and loss are in sight at once
        assert find(browser, "#loss").location["y"] < 500


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_all_curves_have_all_points_at_the_right_height(browser: Any, run: Path, scale: str) -> None:
    open_report(browser, run)
    records = read_metrics(run / "metrics.jsonl")
    for curve, count in CURVES.items():
        box = next(iter(browser.find_elements("css selector", f".{scale}:has([data-curve={curve}])")), None)
        if box is None:
            assert scale == "log"
            assert curve in ("lr", "tokens_per_second")
            continue
        numbers = re.findall(r"\d+", box.find_element("css selector", f"[data-curve={curve}]").get_attribute("d"))
        points = list(zip(map(int, numbers[::2]), map(int, numbers[1::2]), strict=True))
        assert len(points) == count, curve
        if curve.endswith("_smooth"):
            continue
        low, high = (float(box.get_attribute(f"data-{end}")) for end in ("low", "high"))
        place = math.log if scale == "log" else float
        logged = [(r["step"], r[curve]) for r in records if math.isfinite(r.get(curve, math.nan))]
        for (x, y), (step, value) in zip(points, logged, strict=True):
            assert x == pytest.approx(4000 * step / STEPS, abs=1)
            height = (place(value) - place(low)) / (place(high) - place(low))
            assert y == pytest.approx(1000 * (1 - height), abs=1)


@pytest.mark.parametrize("size", SIZES)
def test_the_read_out_is_what_was_logged(browser: Any, run: Path, size: str) -> None:
    open_report(browser, run, size)
    records = {(r["kind"], r["step"]): r for r in read_metrics(run / "metrics.jsonl")}
    for chart, share in (("loss", 0.31), ("grad_norm", 0.75), ("speed", 0.98)):
        hover(browser, chart, share)
        step = shown_step(browser)
        assert abs(step - share * STEPS) <= 1.5
        assert shown_step(browser, "lr") == step
        logged, evaluated = records["step", step], step - step % EVAL_EVERY
        assert readout(browser, "loss") == f"{logged['loss']:.4f}"
        assert float(readout(browser, "lr")) == pytest.approx(logged["lr"], rel=5e-3)
        assert float(readout(browser, "grad_norm")) == pytest.approx(logged["grad_norm"], rel=1e-3)
        assert readout(browser, "tokens_per_second") == f"{logged['tokens_per_second']:,.0f}"
        held_out = f"{records['eval', evaluated]['held_out_loss']:.4f}"
        assert readout(browser, "held_out_loss") == held_out + (f" at {evaluated}" if evaluated != step else "")
    assert len(browser.find_elements("css selector", ".cursor")) == 4


def test_keys_move_the_cursor_and_say_what_is_there(browser: Any, run: Path) -> None:
    from selenium.webdriver import Keys

    open_report(browser, run)
    plot = find(browser, "#loss .plot")
    assert (plot.get_attribute("role"), shown_step(browser)) == ("slider", STEPS)
    for keys, step in (((Keys.HOME,), 1), ((Keys.ARROW_RIGHT,) * 3, 4), ((Keys.PAGE_UP, Keys.ARROW_LEFT), 13)):
        plot.send_keys(*keys)
        assert shown_step(browser) == step
        assert plot.get_attribute("aria-valuenow") == str(step)
        assert f"step {step} raw {readout(browser, 'loss')}" in plot.get_attribute("aria-valuetext")
    assert readout(browser, "held_out_loss") == "none"  # none has been measured yet
    plot.send_keys(Keys.ESCAPE)
    assert shown_step(browser) == STEPS
    assert browser.find_elements("css selector", ".cursor") == []


def test_a_value_that_is_not_finite_is_marked_and_read_out(browser: Any, run: Path) -> None:
    open_report(browser, run)
    hover(browser, "loss", BAD / STEPS)
    assert (shown_step(browser), readout(browser, "loss"), readout(browser, "grad_norm")) == (BAD, "nan", "inf")
    gap = find(browser, "#loss .linear .gaps").get_attribute("d")
    assert gap.startswith(f"M{4000 * BAD // STEPS} ")


def test_the_log_switch_changes_its_chart_and_the_cursor_follows(browser: Any, run: Path) -> None:
    open_report(browser, run)
    find(browser, "#loss .plot").send_keys("\ue011\ue014")  # Home, right
    before = find(browser, "#loss .dot.loss").location
    find(browser, "#loss .switch input").click()
    visible = {
        (chart, scale): find(browser, f"#{chart} .{scale}").is_displayed()
        for chart in ("loss", "grad_norm")
        for scale in ("linear", "log")
    }
    assert visible == {
        ("loss", "linear"): False,
        ("loss", "log"): True,
        ("grad_norm", "linear"): True,
        ("grad_norm", "log"): False,
    }
    find(browser, "#loss .plot").send_keys("\ue011\ue014")
    assert find(browser, "#loss .dot.loss").location["y"] != before["y"]


def test_the_digest_can_be_copied_and_the_job_unfolded(browser: Any, run: Path) -> None:
    open_report(browser, run)
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    browser.execute_cdp_cmd("Browser.grantPermissions", {"permissions": permissions})
    button = find(browser, "[data-copy]")
    assert button.text == DIGEST[:12]
    assert DIGEST in button.get_attribute("title")
    button.click()
    assert browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])") == DIGEST
    job = find(browser, "details pre")
    assert not job.is_displayed()
    find(browser, "summary").click()
    assert f"steps = {STEPS}" in job.text


def test_charts_are_there_without_scripts(browser: Any, run: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        open_report(browser, run)
        assert find(browser, "#loss .linear [data-curve=loss]").rect["width"] > 900
        assert not find(browser, "#loss .log").is_displayed()
        find(browser, "#loss .switch input").click()
        assert find(browser, "#loss .log").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.parametrize("total", [0, 1, 2])
def test_short_runs_are_shown_without_errors(browser: Any, tmp_path: Path, total: int) -> None:
    write_report(write_run(tmp_path / "run", total, summary=None))
    open_report(browser, tmp_path / "run", "phone")
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    if total:
        assert shown_step(browser) == total
        hover(browser, "loss", 0.1)
        assert shown_step(browser) == 1


def test_rollouts_can_be_looked_through_token_by_token(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.support.ui import Select

    changes = {step: policy_figures(step, 9) for step in range(1, 10)}
    run = write_run(tmp_path / "run", 9, changes=changes)
    write_rollouts(run, [group_record(1, "first"), group_record(9, "last", "<b>\x00</b>")])
    write_report(run)
    open_report(browser, run)
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    chosen = Select(find(browser, "#group"))
    assert chosen.first_selected_option.text == "step 9: last"
    first, second = browser.find_elements("css selector", ".attempt")
    assert first.text.splitlines() == ["reward 1.00 4 is right", "2+2=<b>␀</b><|endoftext|>"]
    assert second.find_element("css selector", "p").text == "reward 0.00, cut off <b>␀</b> is wrong"
    tokens = first.find_elements("css selector", "span")
    assert tokens[4].get_attribute("title").startswith("advantage 1.5, log-probability -0.5")
    assert "given" in tokens[0].get_attribute("class")

    def colour(attempt: int) -> str:
        shown = browser.find_elements("css selector", ".attempt")[attempt]
        return shown.find_elements("css selector", "span")[4].value_of_css_property("background-color")

    by_advantage = colour(0)
    assert by_advantage != colour(1)  # one is good, the other bad
    Select(find(browser, "#colour")).select_by_value("difference")
    assert colour(0) == colour(1) != by_advantage
    Select(find(browser, "#group")).select_by_index(0)
    assert "2+2=4" in find(browser, ".attempt").text
