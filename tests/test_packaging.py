"""A built wheel holds all it needs, and works in an environment and a folder that know nothing of this repository."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.jobs import environment

REPOSITORY = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")


def shell(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the repository; without isolation, so that no network is needed."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copy(REPOSITORY / name, copy)
    shutil.copytree(REPOSITORY / "equigrad", copy / "equigrad", ignore=shutil.ignore_patterns("__pycache__"))
    shell(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", copy / "dist", cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel in it.

    Dependencies come from this test's own environment, as torch is too large to install again; a plain path in a .pth
    file brings packages only, so an editable install of equigrad in there stays unseen.
    """
    folder = tmp_path_factory.mktemp("empty") / "venv"
    shell(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    interpreter = folder / "bin" / "python"
    site = Path(shell(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    install = ["install", "--quiet", "--no-deps", "--no-index", wheel]
    shell(sys.executable, "-m", "pip", "--python", interpreter, *install, cwd=folder)
    return interpreter


def test_the_wheel_holds_code_data_and_licence_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "py.typed",
        "config/quickstart.toml",
        "data/corpora/moby_dick.jsonl.gz",
        "data/corpora/sotu.jsonl.gz",
        "observe/report_template.html",
    ):
        assert f"equigrad/{name}" in names
    kept = {str(f.relative_to(REPOSITORY)) for f in (REPOSITORY / "equigrad").rglob("*.py")}
    assert kept <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"equigrad"}
    assert {"LICENSE", "NOTICE"} <= {Path(name).name for name in names}


def test_every_data_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {str(f.relative_to(REPOSITORY)) for f in (REPOSITORY / "equigrad").rglob("*") if f.is_file()}
    assert {f for f in files - names if "__pycache__" not in f} == set()


def test_the_installed_package_is_the_wheel_s(python: Path, tmp_path: Path) -> None:
    where = shell(python, "-c", "import equigrad; print(equigrad.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(python.parents[1])


def test_the_installed_command_answers(python: Path, tmp_path: Path) -> None:
    assert "usage: equigrad COMMAND" in shell(python.with_name("equigrad"), "--help", cwd=tmp_path)


def test_the_installed_command_trains_on_the_built_in_text(python: Path, tmp_path: Path) -> None:
    tiny = "--data.tokenizer.kind bytes --model.hidden_size 16 --model.intermediate_size 16 --model.num_hidden_layers 1"
    tiny += " --model.num_attention_heads 2 --batch.tokens 1024 --observe.sample_tokens 4 --train.steps 2"
    printed = shell(python.with_name("equigrad"), "train", *tiny.split(), cwd=tmp_path)
    assert "done: 2 steps" in printed
    run = tmp_path / "runs" / "quickstart"
    assert (run / "report.html").stat().st_size > 10_000
    shell(python.with_name("equigrad"), "export", run, "model", cwd=tmp_path)
    assert (tmp_path / "model" / "model.safetensors").exists()
