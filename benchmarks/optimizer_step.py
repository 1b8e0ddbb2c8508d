"""One step of the optimizers, against ``torch.optim.Muon``, and divided over two processes against repeated on both.

The matrices are those of a decoder of hidden 512; gradients are random. ``torch.optim.Muon`` computes in bfloat16, for
which most CPUs have no instructions; so it is measured in float32 too, its one function for that replaced, and as it is
in few rounds. Two processes have parameters sharded over them: once matrices are shared out (the product), once every
rank gathers all of them and works on all, as one writes it by hand.

    python benchmarks/optimizer_step.py
"""

import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from common import arguments, interleaved, pin_threads, ratio, show, spread, write

OPTIONS = arguments("optimizer_step", __doc__ or "", rounds=8, layers=2, hidden=512, half_rounds=2)
pin_threads(OPTIONS.threads)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.optim import _muon  # noqa: E402

from equigrad.config.optim import Optim  # noqa: E402
from equigrad.models.specs import Spec  # noqa: E402
from equigrad.optim.arithmetic import Native  # noqa: E402
from equigrad.optim.newton_schulz import newton_schulz  # noqa: E402
from equigrad.optim.optimizer import Optimizer  # noqa: E402
from equigrad.parallel.collectives import ALONE, Axis  # noqa: E402
from equigrad.parallel.placement import Placed, whole  # noqa: E402

PERIOD = 5
LR = 1e-3


def shapes() -> dict[str, tuple[int, int]]:
    hidden, inner = OPTIONS.hidden, OPTIONS.hidden * 11 // 4
    of_layer = {"q": (hidden, hidden), "k": (hidden // 2, hidden), "v": (hidden // 2, hidden), "o": (hidden, hidden),
                "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}  # fmt: skip
    return {f"{layer}.{name}": shape for layer in range(OPTIONS.layers) for name, shape in of_layer.items()}


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes().items()}


def product(config: Optim, axis: Axis = ALONE) -> Callable[[], None]:
    """The optimizer on this rank's rows; ``config.period`` steps at once where that is not 1."""
    specs = {name: Spec(shape, "matrix") for name, shape in shapes().items()}
    places = {
        name: whole(name, spec.shape).part(0, spec.shape[0], axis.size, axis.rank) for name, spec in specs.items()
    }

    def own(values: dict[str, Tensor]) -> dict[str, Placed]:
        rows = {name: slice(at.offset[0], at.offset[0] + at.local_shape[0]) for name, at in places.items()}
        return {name: Placed(places[name], values[name][rows[name]].clone()) for name in values}

    optimizer, gradients = Optimizer(config, own(tensors(0)), specs, Native(axis.add), axis), own(tensors(1))
    steps = config.period if config.name == "lionmuon" else 1

    def run() -> None:
        for _ in range(steps):
            optimizer.step(gradients, LR)

    return run


def torchs() -> Callable[[], None]:
    parameters = [torch.nn.Parameter(x) for x in tensors(0).values()]
    for parameter, gradient in zip(parameters, tensors(1).values(), strict=True):
        parameter.grad = gradient
    optimizer = torch.optim.Muon(parameters, lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return lambda: (optimizer.step(), None)[1]


def in_float32(step: Callable[[], None]) -> Callable[[], None]:
    """``torch.optim.Muon`` with its own iteration, but for the type."""
    half = _muon._zeropower_via_newtonschulz

    def single(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
        a, b, c = coefficients
        x = grad.T if grad.size(0) > grad.size(1) else grad
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            squares = x @ x.T
            x = torch.addmm(x, torch.addmm(squares, squares, squares, beta=b, alpha=c), x, beta=a)
        return x.T if grad.size(0) > grad.size(1) else x

    def run() -> None:
        _muon._zeropower_via_newtonschulz = single
        try:
            step()
        finally:
            _muon._zeropower_via_newtonschulz = half

    return run


def repeated(axis: Axis) -> Callable[[], None]:
    """Muon by hand: each rank gathers every update whole, and makes all of them orthogonal."""
    config, rows = Optim(name="muon"), {n: shape[0] // axis.size for n, shape in shapes().items()}
    cut = {n: slice(axis.rank * r, (axis.rank + 1) * r) for n, r in rows.items()}
    weights, gradients = ({n: x[cut[n]].clone() for n, x in tensors(seed).items()} for seed in (0, 1))
    buffers = {n: torch.zeros_like(x) for n, x in weights.items()}

    def run() -> None:
        for name, weight in weights.items():
            buffers[name].mul_(config.momentum).add_(gradients[name])
            update = gradients[name].add(buffers[name], alpha=config.momentum)
            full = update.new_empty(shapes()[name])
            dist.all_gather_into_tensor(full, update, group=axis.group)
            made = newton_schulz(full[None], config)[0][cut[name]]
            scale = 0.2 * max(full.shape) ** 0.5
            weight.mul_(1 - LR * config.weight_decay).add_(made, alpha=-LR * scale)

    return run


def serve(rank: int, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    axis = Axis(dist.group.WORLD, rank, 2)
    sides = {"shared": product(Optim(name="muon"), axis), "repeated": repeated(axis)}
    while (side := pipe.recv()) is not None:
        sides[side]()
        pipe.send(None)
    dist.barrier()
    dist.destroy_process_group()


def two_processes() -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        context, pipes, started = mp.get_context("spawn"), [], []
        for rank in range(2):
            near, far = context.Pipe()
            started.append(context.Process(target=serve, args=(rank, folder, far), daemon=True))
            started[-1].start()
            pipes.append(near)

        def run(side: str) -> Callable[[], None]:
            def both() -> None:
                for pipe in pipes:
                    pipe.send(side)
                for pipe in pipes:
                    pipe.recv()

            return both

        seconds = interleaved({side: run(side) for side in ("shared", "repeated")}, OPTIONS.rounds)
        for pipe in pipes:
            pipe.send(None)
        for process in started:
            process.join()
    return seconds


def main() -> None:
    began = time.perf_counter()
    muon, float32 = product(Optim(name="muon")), "torch.optim.Muon in float32"
    result: dict[str, Any] = {"parameters": sum(m * n for m, n in shapes().values()), "seconds": {}, "over": {}}
    half = interleaved({"muon": muon, "torch.optim.Muon": torchs()}, OPTIONS.half_rounds, 1)
    result["over"]["muon / torch.optim.Muon"] = ratio(half["muon"], half["torch.optim.Muon"])
    show("muon / torch.optim.Muon", result["over"]["muon / torch.optim.Muon"])
    sides = {float32: in_float32(torchs()), "muon": muon}
    sides |= {name: product(Optim(name=name)) for name in ("normuon", "meqmuon", "lion", "adamw")}
    sides["lionmuon"] = product(Optim(name="lionmuon", period=PERIOD))
    seconds = interleaved(sides, OPTIONS.rounds, 1)
    seconds["lionmuon"] = [s / PERIOD for s in seconds["lionmuon"]]
    for name, values in seconds.items():
        result["seconds"][name] = spread(values)
        for base in (float32, "muon"):
            result["over"][f"{name} / {base}"] = ratio(values, seconds[base])
            show(f"{name} / {base}", result["over"][f"{name} / {base}"])
    two = two_processes()
    result["two_processes"] = {"shared / repeated": ratio(two["shared"], two["repeated"])}
    show("two processes: shared / repeated", result["two_processes"]["shared / repeated"])
    result["wall_seconds"] = time.perf_counter() - began
    write(OPTIONS.json, result)


if __name__ == "__main__":
    main()
