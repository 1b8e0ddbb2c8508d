"""Peaks are measured quickly and without side effects, or looked up under exactly their device's name."""

import mmap
import time

import pytest
import torch

from equigrad.observe.peak import _datasheet, device_peak, measure_gemm_peak, memory_mb

CPU = torch.device("cpu")


def test_a_cpu_is_measured_in_little_time() -> None:
    start = time.perf_counter()
    flops, source = device_peak(CPU, torch.float32)
    assert source == "measured"
    assert 1e8 < flops < 1e15
    assert time.perf_counter() - start < 3  # 0.3 s on a machine that is not busy


def test_a_measurement_changes_neither_random_numbers_nor_threads() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    measure_gemm_peak(CPU, torch.bfloat16, threads=1, seconds=0.01)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_datasheet_peaks_in_bfloat16(name: str, teraflops: float) -> None:
    assert _datasheet(name, torch.bfloat16, tf32=False) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    "name",
    ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H20", "NVIDIA A10G", "L4X"],
)
def test_other_variants_are_not_guessed(name: str) -> None:
    assert _datasheet(name, torch.bfloat16, tf32=False) is None


def test_float32_means_what_pytorch_is_set_to() -> None:
    assert _datasheet("NVIDIA H200", torch.float32, tf32=True) == pytest.approx(494.5e12)
    assert _datasheet("NVIDIA H200", torch.float32, tf32=False) == pytest.approx(67e12)
    assert _datasheet("NVIDIA H200", torch.float64, tf32=True) is None


def test_memory_follows_what_the_process_holds() -> None:
    before = memory_mb(CPU)
    # Pages of its own: an allocation might find room in what earlier tests have given back.
    with mmap.mmap(-1, 200_000_000) as held:
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        assert 150 < memory_mb(CPU) - before < 250


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_comes_near_its_datasheet_and_does_not_pass_it() -> None:
    gpu = torch.device("cuda")
    stated = device_peak(gpu, torch.bfloat16)
    assert 0.3 < measure_gemm_peak(gpu, torch.bfloat16) / stated.flops <= 1.05
    assert memory_mb(gpu) > 0
