"""The documentation says what is so: its configuration is the code's, its commands exist, its links lead somewhere."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from equigrad.cli import COMMANDS, main, parser_of, split_overrides
from equigrad.config import Job
from equigrad.config.load import parse_overrides, walk

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
KEYS = {key for key, _ in walk(Job)}


def commands() -> list[tuple[str, list[str]]]:
    """Every line of a page (or a preset's comment) that runs equigrad, as page and words."""
    found = []
    for page in [*PAGES, *sorted((REPOSITORY / "configs").glob("*.toml"))]:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^(?:\$ |#   |srun ).*?\bequigrad (?:-- )?(\w+ .*|--help)$", text, re.MULTILINE):
            found.append((page.name, ["equigrad", *shlex.split(line, comments=True)]))
    return found


def test_the_configuration_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("reference", REPOSITORY / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run: python docs/reference.py"


def test_the_job_that_the_tutorial_shows_is_the_one_that_it_runs() -> None:
    shown = (REPOSITORY / "configs" / "finetune.toml").read_text(encoding="utf-8")
    assert f"```toml\n{shown}```\n" in (REPOSITORY / "docs" / "tutorial.md").read_text(encoding="utf-8")


def test_the_drawn_schedule_is_what_the_command_draws_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    drawn = tmp_path / "division.svg"
    words = next(words for page, words in commands() if page == "division.md" and "--svg" in words)
    assert main([str(drawn) if word == "docs/division.svg" else word for word in words[1:]]) == 0
    capsys.readouterr()
    kept = (REPOSITORY / "docs" / "division.svg").read_text(encoding="utf-8")
    assert drawn.read_text(encoding="utf-8") == kept, f"run: {' '.join(words)}"


def test_the_configuration_page_has_every_key() -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
    for key in KEYS:
        assert f"| `{key.rpartition('.')[2]}` |" in page, key


def test_there_are_commands_to_check() -> None:
    assert {words[1] for _, words in commands()} >= set(COMMANDS)


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda v: v if isinstance(v, str) else " ".join(v)[:60])
def test_a_command_in_the_documentation_can_be_typed(page: str, words: list[str]) -> None:
    _, command, *rest = words
    if command == "--help" or "--help" in rest:
        return
    own, overrides = split_overrides(rest) if COMMANDS[command].overridable else (rest, [])
    arguments = parser_of(command).parse_args(own)
    assert all(key in KEYS or any(k.startswith(f"{key}.") for k in KEYS) for key, _ in parse_overrides(overrides))
    if getattr(arguments, "job", None) and arguments.job.startswith(("configs/", "docs/")):
        assert (REPOSITORY / arguments.job).exists()


def test_the_table_of_commands_is_complete() -> None:
    table = re.findall(r"^\| `equigrad (\w+)", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert table == list(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"`((?:tests|configs|equigrad|benchmarks|docs)/[\w./-]*)`", text):
        assert (REPOSITORY / path).exists(), path


def test_nothing_is_fetched_from_elsewhere_by_the_site() -> None:
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in text
    assert "http" not in text
