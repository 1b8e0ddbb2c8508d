"""Fixtures shared by all tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run at a time
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test starts compiles every module again
os.environ["HF_HUB_OFFLINE"] = "1"  # before `transformers` or `datasets` load: no test may reach a hub

from collections.abc import Callable, Iterator

import pytest

from tests.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], Workers]]:
    """``workers(n)``: a pool of n gloo ranks, started on first use and kept for the session."""
    pools: dict[int, Workers] = {}

    def pool(size: int) -> Workers:
        if size not in pools or not pools[size].alive:
            pools[size] = Workers(size)
        return pools[size]

    yield pool
    for started in pools.values():
        started.close()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on pools share one process of pytest, for a second set of pools would take the cores from the first; so do
    those that compare with one long run. They come first, and then tests that have asked for more time than others, so
    that short ones can fill up what is left."""
    for item in items:
        for fixture in ("workers", "twenty"):
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group(fixture))
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ("xdist_group", "timeout")])


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tokenised sources of tests stay out of the user's cache."""
    os.environ["EQUIGRAD_CACHE"] = str(tmp_path_factory.mktemp("cache"))
