"""The direction of the arrows between rooms, and what may be imported where. Read from the source, not from a run."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import equigrad
from tests.jobs import environment

ROOT = Path(equigrad.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Each line may import from the lines below it, and from itself where `BESIDE` says so. Rooms of one line do not know
# each other.
LEVELS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"commands"},
    {"audit"},
    {"prepare"},
    {"rl"},
    {"trainer"},
    {"build", "evaluation", "execution", "plan", "resolve", "rows", "run"},
    {"data", "schedule", "objectives", "optim", "checkpoint", "observe", "memory"},
    {"models"},
    {"numerics"},
    {"parallel"},
    {"config"},
    {"errors", "files", "__init__"},
]
BESIDE = {
    ("evaluation", "rows"),
    ("evaluation", "execution"),
    ("execution", "rows"),
    ("schedule", "data"),
    ("resolve", "run"),
    ("files", "errors"),
}
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}

TORCH_FREE = [
    "audit.layouts", "audit.report", "audit.trajectory",
    "cli", "files", "run", "resolve", "checkpoint.weights", "schedule.packing",
    "schedule.pipeline", "schedule.division", "schedule.text", "schedule.svg", "commands.schedule",
    "commands.simulate", "parallel.partition", "parallel.program", "models.parts",
    "models.specs", "models.huggingface", "memory.estimate", "numerics.budget",
    "optim.schedule", "parallel.environment", "parallel.launch", "parallel.stop", "commands.train", "config.load",
    "commands.plan", "commands.words",
    *(f"plan.{file.stem}" for file in FILES if file.parent.name == "plan" and file.stem != "__init__"),
    *(f"config.{file.stem}" for file in FILES if file.parent.name == "config" and file.stem != "__init__"),
    *(f"rl.tasks.{file.stem}" for file in FILES if file.parent.name == "tasks" and file.stem != "__init__"),
    *(f"plan.mixed.{file.stem}" for file in FILES if file.parent.name == "mixed" and file.stem != "__init__"),
    *(f"plan.cluster.{file.stem}" for file in FILES if file.parent.name == "cluster" and file.stem != "__init__"),
    "rl.engine.protocol",
    *(f"data.{file.stem}" for file in FILES if file.parent.name == "data" and file.stem != "__init__"),
]  # fmt: skip
OPTIONAL = {
    "wandb",
    "tensorboard",
    "transformers",
    "peft",
    "datasets",
    "pyarrow",
    "ray",
    "reasoning_gym",
    "vllm",
    "triton",
    "flash_attn",
}
NEEDS_TRITON = "numerics/exact/kernels"
"""Imported where a GPU is used, by ``exact.fused``; not with any module but its own."""
CUDA = {
    "numerics/exact/fused.py": "functions are run by device",
    "config/layout.py": "the device is the user's choice",
    "parallel/world.py": "here a rank gets its device",
    "numerics/attention.py": "kernels are chosen by device",
    "observe/peak.py": "peaks and memory are measured by device",
    "checkpoint/rng.py": "the key of CUDA's generator in a checkpoint",
}


def module(file: Path) -> str:
    """``data.sources`` for equigrad/data/sources.py; ``__init__`` for the package itself."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room(name: str) -> str:
    return name.split(".")[0]


def imports(file: Path, everywhere: bool = True) -> Iterator[tuple[int, str]]:
    """Line and full name of what a file imports; unless ``everywhere`` only what is imported with the module, and not
    for type checkers alone."""

    def visit(node: ast.AST) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test) and not everywhere:
                continue
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not everywhere:
                continue
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{file}:{child.lineno}: imports are absolute"
                inside = child.module == "equigrad"  # `from equigrad import rows` is an import of a module
                yield from ((child.lineno, f"equigrad.{a.name}") for a in child.names if inside and a.name in LEVEL)
                yield child.lineno, str(child.module)
            yield from visit(child)

    yield from visit(ast.parse(file.read_text(encoding="utf-8")))


def test_every_room_has_its_place() -> None:
    assert {room(module(file)) for file in FILES} == set(LEVEL)


def test_arrows_run_down() -> None:
    wrong = []
    for file in FILES:
        here = room(module(file))
        for line, name in imports(file):
            if room(name) != "equigrad":
                continue
            there = room(name.removeprefix("equigrad").removeprefix(".") or "__init__")
            if here != there and LEVEL[here] >= LEVEL[there] and (here, there) not in BESIDE:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []


def test_the_trainer_knows_neither_commands_nor_the_command_line() -> None:
    names = {name for _, name in imports(ROOT / "trainer.py")}
    assert not any(name.startswith(("equigrad.commands", "equigrad.cli")) for name in names)


def test_plans_know_what_is_known_before_a_run_and_how_to_draw_and_nothing_that_runs() -> None:
    known = {"config", "schedule", "plan", "errors", "files", "observe.charts", "observe.text"}
    known |= {"memory.estimate", "models.parts", "models.specs"}
    for file in (file for file in FILES if room(module(file)) == "plan"):
        for _, name in imports(file):
            inside = name.removeprefix("equigrad.")
            assert room(name) != "equigrad" or room(inside) in known or inside in known, f"{file} imports {name}"


def test_models_are_written_on_the_op_set_alone() -> None:
    """The decoder computes nothing by itself: what it takes from torch are names for types and parameters."""
    tree = ast.parse((ROOT / "models" / "decoder.py").read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
    }
    assert used <= {"no_grad", "empty", "device", "float32"}
    assert not any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult) for node in ast.walk(tree))


@pytest.mark.parametrize("name", TORCH_FREE)
def test_this_module_says_no_torch(name: str) -> None:
    """By its own words; the next test follows what it imports."""
    file = ROOT / (name.replace(".", "/") + ".py")
    assert not [line for line, imported in imports(file, everywhere=False) if room(imported) == "torch"]


def test_no_torch_is_loaded_by_what_must_answer_at_once() -> None:
    listed = ", ".join(f"equigrad.{name}" for name in TORCH_FREE)
    code = f"import sys, {listed}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_no_optional_dependency_is_imported_with_a_module() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in FILES
        for line, name in imports(file, everywhere=False)
        if (room(name) in OPTIONAL or name == "torch.utils.tensorboard")
        and not (room(name) == "triton" and file.is_relative_to(ROOT / NEEDS_TRITON))
    ]
    assert found == []


def test_kernels_are_imported_with_no_other_module() -> None:
    name = f"equigrad.{NEEDS_TRITON.replace('/', '.')}"
    outside = [file for file in FILES if not file.is_relative_to(ROOT / NEEDS_TRITON)]
    assert not [f for f in outside if any(n.startswith(name) for _, n in imports(f, everywhere=False))]


def test_every_module_imports_where_no_extra_is_installed() -> None:
    code = f"""
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL | {"selenium", "pytest", "mkdocs"}}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import equigrad
for found in pkgutil.walk_packages(equigrad.__path__, "equigrad."):
    if not found.name.endswith("__main__") and "{NEEDS_TRITON.replace("/", ".")}." not in found.name:
        importlib.import_module(found.name)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_device_is_named_only_where_devices_are_told_apart() -> None:
    named = set()
    for file in FILES:
        strings = (node.value for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if is_text(node))
        if any(text == "cuda" or text.startswith("cuda:") for text in strings):
            named.add(str(file.relative_to(ROOT)))
    assert named <= set(CUDA)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_no_pickle_anywhere() -> None:
    """Checkpoints are safetensors and JSON; loading somebody else's file must never run code."""
    pickling = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    assert [f for f in FILES if pickling & {room(name) for _, name in imports(f)}] == []
    calls = {"torch.load", "torch.save"}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in calls, file


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(file.relative_to(ROOT))
        for file in FILES
        if file.read_text(encoding="utf-8").strip() and not ast.get_docstring(ast.parse(file.read_text("utf-8")))
    ]
    assert silent == []


def test_importing_the_package_costs_nothing() -> None:
    code = "import sys; before = set(sys.modules); import equigrad; print(len(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert int(done.stdout) == 1
