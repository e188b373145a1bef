"""The pool of rank processes itself."""

from __future__ import annotations

import os
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankError, RankFailed, UnexpectedWarning


def identity() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads()


def summed(start: float) -> torch.Tensor:
    value = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(value)
    return value


def process_id() -> int:
    return os.getpid()


def drawn() -> float:
    return torch.rand(()).item()


def fail_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise FileNotFoundError(f"nothing for {rank}")
    dist.barrier()  # never met by the failing rank, whose end must be noticed here
    return "fine"


def fail_on_both() -> None:
    raise ValueError(f"bad {dist.get_rank()}")


def hang_on(rank: int) -> str:
    while dist.get_rank() == rank:
        time.sleep(0.05)
    return "fine"


def die_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os._exit(7)
    return "fine"


def crash() -> None:
    import ctypes

    ctypes.string_at(0)


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def leave_settings() -> None:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)


def settings() -> tuple[bool, torch.dtype]:
    return torch.is_grad_enabled(), torch.get_default_dtype()


def unpicklable() -> object:
    return lambda: None


def destroy_itself() -> None:
    dist.destroy_process_group()


def leave() -> None:
    sys.exit(3)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_rank_has_its_own_result(pool: Pool, world_size: int) -> None:
    assert pool.run(world_size, identity) == [(r, world_size, 1) for r in range(world_size)]


def test_arguments_and_tensors_travel(pool: Pool) -> None:
    assert [value.item() for value in pool.run(2, summed, 10.0)] == [21.0, 21.0]


def test_processes_are_kept_and_draw_the_same(pool: Pool) -> None:
    first = pool.run(2, process_id)
    assert len(set(first)) == 2
    assert pool.run(2, process_id) == first
    assert len({*pool.run(2, drawn), *pool.run(2, drawn)}) == 1


def test_an_exception_names_its_rank_and_ends_the_others_wait(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"rank 1: FileNotFoundError: nothing for 1") as caught:
        pool.run(2, fail_on, 1)
    failures = {failure.rank: failure for failure in caught.value.failures}
    assert "fail_on" in failures[1].trace
    assert failures[1].is_a(OSError) and not failures[1].is_a(ValueError)
    assert set(failures) == {0, 1}, "rank 0 waited for a rank that had failed"
    assert pool.run(2, summed, 1.0)[0].item() == 3.0


def test_all_failures_are_listed(pool: Pool) -> None:
    with pytest.raises(RankFailed) as caught:
        pool.run(2, fail_on_both)
    assert [failure.message for failure in caught.value.failures] == ["bad 0", "bad 1"]


def test_expected_failures_are_returned(pool: Pool) -> None:
    first, second = pool.run(2, die_on, 1, expect_failures=True)
    assert first == "fine"
    assert isinstance(second, RankError)
    assert second.type_name == "RankDied" and "exit code 7" in second.message


def test_a_hung_rank_is_killed_and_replaced(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    before = pool.run(2, process_id)
    first, second = pool.run(2, hang_on, 1, timeout=5, expect_failures=True)
    assert first == "fine"
    assert isinstance(second, RankError) and second.type_name == "RankHung"
    assert "hang_on" in second.trace
    assert "hang_on" in capsys.readouterr().err
    after = pool.run(2, process_id)
    assert after[0] == before[0] and after[1] != before[1]


def test_a_segmentation_fault_is_a_failure_with_a_stack(pool: Pool) -> None:
    (error,) = pool.run(1, crash, expect_failures=True)
    assert error.type_name == "RankDied" and "exit code -11" in error.message
    assert "crash" in error.trace
    assert pool.run(1, identity) == [(0, 1, 1)]


def test_warnings_fail_unless_recorded(pool: Pool) -> None:
    with pytest.raises(UnexpectedWarning, match="careful"):
        pool.run(2, warn)
    pool.run(2, warn, record_warnings=True)
    assert [[w.message for w in rank] for rank in pool.warnings] == [["careful"], ["careful"]]
    assert pool.warnings[0][0].category == "UserWarning"
    pool.run(1, identity)
    assert pool.warnings == [[]]


def test_settings_do_not_leak(pool: Pool) -> None:
    pool.run(1, leave_settings)
    assert pool.run(1, settings) == [(True, torch.float32)]


def test_odd_ends(pool: Pool) -> None:
    with pytest.raises(RankFailed, match="lambda"):
        pool.run(1, unpicklable)
    with pytest.raises(RankFailed, match="SystemExit: 3"):
        pool.run(1, leave)
    pool.run(2, destroy_itself)
    assert pool.run(2, summed, 0.0)[1].item() == 1.0


def test_a_closed_pool_leaves_no_process() -> None:
    own = Pool()
    try:
        (child,) = own.run(1, process_id)
        os.kill(child, 0)
    finally:
        own.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_crash_in_a_subprocess_is_visible(pool: Pool) -> None:
    done = pool.run_in_subprocess("import ctypes; ctypes.string_at(0)")
    assert done.returncode == -11
    done = pool.run_in_subprocess(
        "import os; print(os.environ['GREETING'])", env={"GREETING": "hi"}
    )
    assert (done.returncode, done.stdout) == (0, "hi\n")
