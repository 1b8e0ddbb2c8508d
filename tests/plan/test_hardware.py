"""Constants: every one has a value, a unit and a source, and measured collectives are what latencies come from."""

import re
from pathlib import Path

import numpy as np
import pytest

from equigrad.errors import UserError
from equigrad.plan.calibration import calibration
from equigrad.plan.hardware import MICRO, constants, hardware


def test_every_constant_says_where_it_is_from() -> None:
    found = [*constants(hardware()), *constants(calibration())]
    assert len({name for name, _ in found}) == len(found) > 70
    for name, constant in found:
        assert constant.value > 0, name
        assert constant.unit, name
        assert len(constant.source) > 15, name


def test_every_source_is_a_place_that_can_be_read_or_says_that_there_is_none() -> None:
    place = re.compile(r"arXiv \d{4}\.\d{5}|[\w-]+/[\w.-]+|the measured .* table of this file|twice the peak")
    for name, constant in constants(hardware()):
        assert place.search(constant.source), f"{name}: {constant.source}"
    guessed = [name for name, constant in constants(hardware()) if constant.assumed]
    assert guessed == ["devices.h100_96gb_500w.peak", "devices.h100_96gb_500w.peak_fp8"]


def test_every_machine_has_a_device() -> None:
    for machine in hardware().machines.values():
        hardware().device(machine.device)


def test_a_relative_s_share_stands_in_for_a_product_that_was_not_measured() -> None:
    known = hardware()
    assert known.devices["h200"].product is None
    assert known.product_rate("h200") == pytest.approx(known.product_rate("h100_80gb"))


def test_a_broken_data_file_is_named_with_the_key(tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    file.write_text('{"devices": {"x": {"architecture": 1}}, "machines": {}, "measured": []}')
    with pytest.raises(UserError, match=r"hardware\.json: devices\.x\.architecture"):
        hardware(file)
    with pytest.raises(UserError, match="cannot read"):
        hardware(tmp_path / "none.json")


def latency_of(name: str) -> float:
    """Seconds: of t = latency + V / b, fitted in log by a fine search; b is the bandwidth of the largest message."""
    table = next(found for found in hardware().measured if found.name == name)
    size = np.array(table.mib) * 2**20 * 2 * (table.ranks - 1) / table.ranks
    measured = size / (np.array(table.gb_s) * 1e9)
    rate = table.gb_s[-1] * 1e9
    grid = np.geomspace(1e-6, 1e-2, 2000)
    wrong = [np.sum(np.log((g + size / rate) / measured) ** 2) for g in grid]
    return float(grid[int(np.argmin(wrong))])


def test_latencies_are_those_of_the_measured_collectives() -> None:
    machine = hardware().machine("dgx_b200")
    inside = latency_of("8xH200") / 2
    assert machine.inside.latency.value * MICRO == pytest.approx(inside, rel=0.01)
    between = (latency_of("4x8xB200") - latency_of("8xH200")) / 2 / 2
    assert machine.between.latency.value * MICRO == pytest.approx(between, rel=0.01)
