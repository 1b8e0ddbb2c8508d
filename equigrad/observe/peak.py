"""How fast the device can multiply at best, which model FLOP utilisation is a share of, and how much memory is in use.

Every figure says where it comes from: the vendor's datasheet, or a measurement made here. An unknown device is
measured, never guessed from its relatives.
"""

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import torch


class Peak(NamedTuple):
    """flops: floating-point operations per second of one device (a multiply-add is two); source: where it is from."""

    flops: float
    source: Literal["measured", "datasheet"]


class Gpu(NamedTuple):
    """Dense peaks in teraflop/s with float32 accumulation; datasheets that state sparse figures are halved."""

    name: str  # a pattern for the whole of torch.cuda.get_device_name(): other variants and MIG slices do not match
    half: float  # bfloat16 and float16 tensor cores
    tf32: float  # float32 matrix products rounded to TF32 by tensor cores
    fp32: float  # float32 outside tensor cores


GPUS = [
    # NVIDIA A100 Tensor Core GPU datasheet (40 GB and 80 GB, SXM and PCIe alike).
    Gpu(r"A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe", 312, 156, 19.5),
    # NVIDIA H100 Tensor Core GPU datasheet: SXM, PCIe (first edition), NVL columns; sparse figures halved.
    Gpu(r"H100 80GB HBM3", 989.5, 494.5, 67),
    Gpu(r"H100 PCIe", 756.5, 378, 51),
    Gpu(r"H100 NVL", 835.5, 417.5, 60),
    # NVIDIA H200 Tensor Core GPU datasheet: SXM and NVL columns; sparse figures halved.
    Gpu(r"H200", 989.5, 494.5, 67),
    Gpu(r"H200 NVL", 835.5, 417.5, 60),
    # NVIDIA GH200 Grace Hopper Superchip datasheet; sparse figures halved.
    Gpu(r"GH200 (480GB|120GB|144G HBM3e)", 990, 494, 67),
    # NVIDIA Blackwell datasheet, per GPU: HGX B200 and GB200 NVL72 columns; sparse figures halved.
    Gpu(r"B200", 2250, 1100, 75),
    Gpu(r"GB200", 2500, 1250, 80),
    # NVIDIA L40S and L4 datasheets (L4: sparse figures halved).
    Gpu(r"L40S", 362, 183, 91.6),
    Gpu(r"L4", 121, 60, 30.3),
    # NVIDIA GA102, Ada and RTX Blackwell GPU architecture whitepapers: tensor figures with FP32 accumulate.
    Gpu(r"GeForce RTX 3090", 71, 35.6, 35.6),
    Gpu(r"GeForce RTX 4090", 165.2, 82.6, 82.6),
    Gpu(r"GeForce RTX 5090", 209.5, 104.8, 104.8),
]


def device_peak(device: torch.device, dtype: torch.dtype, threads: int | None = None) -> Peak:
    """The peak of matrix products whose operands are ``dtype``: the datasheet's where it is known, else measured.

    float32 on a GPU means TF32 where PyTorch is set to use it. ``threads`` is for the measurement on a CPU.
    """
    if device.type == "cuda":
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        stated = _datasheet(torch.cuda.get_device_name(device), dtype, tf32)
        if stated is not None:
            return Peak(stated, "datasheet")
    return Peak(measure_gemm_peak(device, dtype, threads), "measured")


def _datasheet(name: str, dtype: torch.dtype, tf32: bool) -> float | None:
    for gpu in GPUS:
        if re.fullmatch(f"(NVIDIA )?({gpu.name})", name):
            if dtype in (torch.bfloat16, torch.float16):
                return gpu.half * 1e12
            if dtype == torch.float32:
                return (gpu.tf32 if tf32 else gpu.fp32) * 1e12
    return None


def measure_gemm_peak(
    device: torch.device, dtype: torch.dtype, threads: int | None = None, seconds: float = 0.3
) -> float:
    """Flop/s of the fastest of several square matrix products, of growing size, within about ``seconds``.

    A reachable peak, not a theoretical one. On a CPU it is that of ``threads`` threads (None: as PyTorch is set now).
    """
    draw = torch.Generator(device).manual_seed(0)  # its own: a measurement must not move the run's random numbers
    best, size, end = 0.0, 256, time.perf_counter() + seconds
    with _threads(threads if device.type == "cpu" else None):
        while size <= 4096:
            a, b = (torch.randn(size, size, device=device, generator=draw).to(dtype) for _ in range(2))
            _time_product(a, b)  # loads libraries and raises clocks
            took = [_time_product(a, b)]
            while len(took) < 5 and time.perf_counter() + took[0] < end:
                took.append(_time_product(a, b))
            best = max(best, 2 * size**3 / min(took))
            # The next size takes eight times as long, at least twice, and its operands must be drawn.
            if time.perf_counter() + 3 * 8 * took[0] > end:
                break
            size *= 2
    return best


def _time_product(a: torch.Tensor, b: torch.Tensor) -> float:
    _wait(a.device)
    start = time.perf_counter()
    a @ b
    _wait(a.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def memory_mb(device: torch.device) -> float:
    """Memory in MB (10^6 bytes): on CUDA the most that tensors took so far, on a CPU what the process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    try:
        resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return resident_pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:  # no /proc: the most it ever held, which macOS counts in bytes and others in KiB
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
