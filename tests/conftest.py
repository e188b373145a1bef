"""The command line options, the seed, sampling, workers side by side, and the pool of ranks."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TextIO, TypeVar

try:
    import fcntl
except ImportError:
    fcntl = None  # Windows

# One thread here as in the ranks: the reference must add up in the same order as they do.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.pool import RANK_ENVIRONMENT, Pool

T = TypeVar("T")
Sampler = Callable[..., list[T]]

try:
    from hypothesis import settings
except ImportError:
    pass  # its tests skip with a reason
else:
    # No deadline: the machine may be busy. No database: a run depends on its seed alone.
    common = {"deadline": None, "database": None, "print_blob": True}
    settings.register_profile("onecopy", max_examples=50, **common)
    settings.register_profile("onecopy-all", max_examples=500, **common)
    settings.load_profile("onecopy")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("onecopy")
    group.addoption("--seed", type=int, help="repeat the random choices of an earlier run")
    group.addoption("--all", action="store_true", help="every combination, and the slow tests")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(2**31)
    if hasattr(config.option, "hypothesis_seed"):
        # Options reach the workers of xdist as they are here: with the same seeds.
        config.option.hypothesis_seed = config.option.hypothesis_seed or str(config.option.seed)
        settings.load_profile("onecopy-all" if config.option.all else "onecopy")


def pytest_report_header(config: pytest.Config) -> str:
    return f"onecopy: --seed {config.option.seed}" + (" --all" if config.option.all else "")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> Generator[None, None, None]:
    """Say each failure in full at the end: of a long log perhaps only the last lines are seen.

    pytest's own summary has the first line of it.
    """
    yield
    for report in (*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")):
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash is not None else report.longrepr
        terminalreporter.write_line(f"{report.nodeid}: {text}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.all:
        return
    skip = pytest.mark.skip(reason="slow: run by --all (make test-all)")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What has been imported stays: the collections while tests run need not look through it."""
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`@pytest.mark.sampled(names, combinations, n, always=())` parametrizes over a sample."""
    for mark in metafunc.definition.iter_markers("sampled"):
        names, combinations, n = mark.args
        chosen = sample(
            metafunc.config,
            combinations,
            n,
            always=mark.kwargs.get("always", ()),
            key=metafunc.definition.nodeid,
        )
        metafunc.parametrize(names, chosen)


def sample(
    config: pytest.Config, combinations: Iterable[T], n: int, *, always: Iterable[T], key: str
) -> list[T]:
    """The `always` ones and, up to n in all, others drawn by the seed; in their given order."""
    every = list(combinations)
    must = list(always)
    unknown = [one for one in must if one not in every]
    assert not unknown, f"not among the combinations: {unknown}"
    if config.option.all:
        return every
    rest = [one for one in every if one not in must]
    drawn = random.Random(f"{config.option.seed} {key}").sample(
        rest, min(len(rest), max(0, n - len(must)))
    )
    return [one for one in every if one in must or one in drawn]


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed, for tests that draw something."""
    value: int = request.config.option.seed
    return value


@pytest.fixture
def sampled(request: pytest.FixtureRequest) -> Sampler[object]:
    """`sampled(combinations, n, always=())`: a seeded sample, or all of them with --all."""

    def choose(
        combinations: Iterable[object], n: int, always: Sequence[object] = ()
    ) -> list[object]:
        return sample(request.config, combinations, n, always=always, key=request.node.nodeid)

    return choose


@pytest.fixture(autouse=True)
def _turn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextIO | None]:
    """A file on which each test of each worker of xdist has a shared lock while it runs."""
    if fcntl is None or "PYTEST_XDIST_WORKER" not in os.environ:
        yield None
        return
    with (tmp_path_factory.getbasetemp().parent / "turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield file


@pytest.fixture
def alone(_turn: TextIO | None) -> Callable[[], None]:
    """Call it to wait until the other workers' tests are over, and to keep the next ones back."""
    return lambda: None if _turn is None else fcntl.flock(_turn, fcntl.LOCK_EX)


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """A world of one rank that a test has made in this process by `shard` ends with it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)


@pytest.fixture
def rank_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a test launches are set up as those of the pool are."""
    for name, value in RANK_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The session's rank processes: `pool.run(world_size, function, *arguments)`."""
    ranks = Pool()
    try:
        yield ranks
    finally:
        ranks.close()
