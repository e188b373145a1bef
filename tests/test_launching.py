"""The recipes of docs/launching.md: each starts what it says, and a run goes on where it was.

What is started here is what is in examples/launch, word for word. Only what no single machine has
is stood in for: Slurm's own commands (tests/fixtures/slurm), and Kubeflow's operator.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.pool import RANK_ENVIRONMENT, Pool
from tests.test_docs import run_script

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "examples/launch"
SCRIPT = ROOT / "tests/stopped_resume.py"
PATIENCE = 200.0  # seconds, for a busy machine

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
    pytest.mark.timeout(500),
]


class Started:
    """Processes, and all those that they start, known by a mark in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        """In the folder, with torchrun on the path; it prints into the file of this name."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        path = f"{ROOT / 'tests/fixtures/slurm'}:{path}"
        settings = {**os.environ, **RANK_ENVIRONMENT, "PYTHONPATH": str(ROOT), "PATH": path}
        settings |= {"TMPDIR": str(self.folder), "ONECOPY_TEST": str(self.folder), **environment}
        with (self.folder / name).open("wb") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT, env=settings
            )
        self._processes.append(process)
        return process

    def printed(self, name: str) -> list[str]:
        """What is in the file of this name, without torchrun's own words."""
        text = (self.folder / name).read_text(errors="replace")
        return [line for line in text.splitlines() if re.match(r"step|resumed|time is", line)]

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            outputs = [f"{p.name}:\n{p.read_text()}" for p in self.folder.glob("output*")]
            assert time.monotonic() < deadline, "\n".join(outputs)
            time.sleep(0.05)

    def alive(self, variable: str = "") -> list[int]:
        """Those that have this in their environment."""
        wanted = {f"ONECOPY_TEST={self.folder}".encode(), variable.encode()} - {b""}
        found = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError):  # no process, another user's, or gone
                if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                    found.append(int(folder.name))
        return found

    def close(self) -> None:
        """Leave none behind."""
        while pids := self.alive():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._processes:
                process.poll()
            time.sleep(0.05)
        for process in self._processes:
            process.wait()


@contextmanager
def started(folder: Path) -> Iterator[Started]:
    one = Started(folder)
    try:
        yield one
    finally:
        one.close()


def undisturbed(pool: Pool, folder: Path) -> list[str]:
    """What examples/resume.py prints on two ranks if nothing happens to them."""
    folder.mkdir()
    code = (ROOT / "examples/resume.py").read_text()
    return pool.run(2, run_script, code, str(folder))[0].splitlines()


# Slurm --------------------------------------------------------------------------------------------


def test_the_batch_script_asks_for_what_it_needs() -> None:
    """One task a node, a signal in time, and a place in the queue after it; and it is Bash."""
    script = LAUNCH / "slurm.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    asked = set(re.findall(r"^#SBATCH (\S+)$", script.read_text(), re.MULTILINE))
    assert {"--ntasks-per-node=1", "--requeue", "--open-mode=append"} <= asked
    assert any(re.fullmatch(r"--signal=B:USR1@\d+", one) for one in asked)


def test_a_slurm_job_goes_on_after_its_time_is_up(pool: Pool, tmp_path: Path) -> None:
    """On two nodes: it is requeued by the signal, and started again resumes, to the same losses."""
    expected = undisturbed(pool, tmp_path / "undisturbed")
    command = ["bash", str(LAUNCH / "slurm.sbatch"), str(SCRIPT)]
    job = {"SLURM_NNODES": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "n[1-2]"}
    job |= {"PROCESSES_PER_NODE": "1", "STANDIN": str(tmp_path)}
    with started(tmp_path) as processes:
        first = processes.start("output-1", command, **job, STOP_AT="16")
        processes.wait(lambda: (tmp_path / "run/latest").exists())
        processes.wait(lambda: "16" in (tmp_path / "run/latest").read_text())
        first.send_signal(signal.SIGUSR1)
        assert first.wait(PATIENCE) != 0
        assert (tmp_path / "requeued").exists()
        assert any("goes back into the queue" in line for line in processes.printed("output-1"))
        again = processes.start("output-2", command, **job, SLURM_RESTART_COUNT="1")
        assert again.wait(PATIENCE) == 0, (tmp_path / "output-2").read_text()
        resumed, *losses = processes.printed("output-2")
    assert resumed == "resumed from step 16 (run/step-00000016, saved by 2 ranks)"
    assert losses == expected[-len(losses) :]
    assert len(losses) == 10


# Kubernetes, and runs that become smaller ---------------------------------------------------------


def manifest() -> dict[str, object]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: the test extra")
    found: dict[str, object] = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    return found


def test_the_manifest_fits_its_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="not installed: the test extra")
    schema = json.loads((ROOT / "tests/fixtures/pytorchjob.schema.json").read_text())
    job = manifest()
    jsonschema.validate(job, schema)
    spec = job["spec"]
    assert isinstance(spec, dict)
    pod = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    volumes = {one["name"] for one in pod["volumes"]}
    assert {one["name"] for one in pod["containers"][0]["volumeMounts"]} == volumes
    spec["elasticPolicy"]["minReplicas"] = "1"  # the API wants a number
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, schema)


def pod_environment(job: dict[str, object], port: int) -> dict[str, str]:
    """What Kubeflow's operator puts into the environment of this job's pods, on one machine."""
    spec = job["spec"]
    assert isinstance(spec, dict)
    policy = spec["elasticPolicy"]
    container = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    return {
        **{one["name"]: one["value"] for one in container["env"]},
        "OMP_NUM_THREADS": "1",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        # Pods have addresses of their own; and here nobody is to wait long for a second node.
        "PET_LOCAL_ADDR": "127.0.0.1",
        "PET_RDZV_CONF": "last_call_timeout=5,keep_alive_interval=1",
    }


def pod_command(job: dict[str, object]) -> list[str]:
    """That of the pods, with one process in each and a script that can be interrupted."""
    spec = job["spec"]
    assert isinstance(spec, dict)
    container = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    torchrun, processes, script = container["command"]
    assert (processes, Path(script).name) == ("--nproc-per-node=8", "resume.py")
    return [torchrun, "--nproc-per-node=1", str(SCRIPT)]


@pytest.mark.slow
def test_pods_go_on_without_one_of_them_and_with_it_again(pool: Pool, tmp_path: Path) -> None:
    """--nnodes=1:2: one dies with its torchrun, the other goes on; the next one joins it."""
    expected = undisturbed(pool, tmp_path / "undisturbed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = manifest()
    command, environment = pod_command(job), pod_environment(job, port)

    def has_saved(step: int) -> bool:
        latest = tmp_path / "run/latest"
        return latest.exists() and latest.read_text() == f"step-{step:08d}\n"

    with started(tmp_path) as pods:
        # The first one has the store at which they meet, as the operator's worker-0 does.
        first = pods.start("output-0", command, **environment, STOP_AT="32")
        pods.wait(lambda: answers(port))
        second = pods.start("output-1", command, **environment, STOP_AT="16")
        pods.wait(lambda: has_saved(16))
        for pid in pods.alive("STOP_AT=16"):
            os.kill(pid, signal.SIGKILL)
        assert second.wait(PATIENCE) == -signal.SIGKILL
        pods.wait(lambda: has_saved(32))
        third = pods.start("output-2", command, **environment)
        assert first.wait(PATIENCE) == 0, (tmp_path / "output-0").read_text()
        assert third.wait(PATIENCE) == 0, (tmp_path / "output-2").read_text()
        printed = [line for number in range(3) for line in pods.printed(f"output-{number}")]
    assert sorted(printed) == sorted(
        [
            *expected,
            "resumed from step 16 (run/step-00000016, saved by 2 ranks)",
            "resumed from step 32 (run/step-00000032, saved by 1 ranks)",
        ]
    )


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


# Ray Train ----------------------------------------------------------------------------------------

FAILING = """
import os, signal
from pathlib import Path
import ray_train
import ray.train.torch
import onecopy

train, save = ray_train.train, onecopy.save

def train_and_fail_once(settings):
    mark = Path(settings["run"]).with_name("failed")

    def save_and_fail(*arguments, step, **more):
        onecopy.save = save
        save(*arguments, step=step, **more)
        if step == 8 and ray.train.get_context().get_world_rank() == 1 and not mark.exists():
            mark.touch()
            raise RuntimeError("on purpose, once")

    onecopy.save = save_and_fail
    return train(settings)

ray_train.train = train_and_fail_once
ray_train.main()
"""


@pytest.mark.slow
def test_a_loop_on_the_workers_of_ray_goes_on_after_a_failure(tmp_path: Path) -> None:
    """One worker fails once; Ray starts all of them again, and the loop resumes."""
    pytest.importorskip("ray.train", reason="Ray is not installed: the test extra")
    (tmp_path / "failing.py").write_text(FAILING)
    with started(tmp_path) as processes:
        run = processes.start(
            "output",
            [sys.executable, "failing.py"],
            PYTHONPATH=f"{ROOT}:{LAUNCH}",
            HOME=str(tmp_path),  # where Ray leaves a token
            TMPDIR="/tmp",  # the names of its sockets are long
            RAY_USAGE_STATS_ENABLED="0",
            RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.5",
        )
        assert run.wait(400) == 0, (tmp_path / "output").read_text()
        printed = processes.printed("output")
    assert (tmp_path / "failed").exists()
    assert printed == [f"step 24  loss {alone():.4f}"]


def alone() -> float:
    """What the loop of ray_train.py comes to in one process that sees the batches of both."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    inputs = torch.randn(192, 16)
    targets = inputs.sin().sum(dim=1, keepdim=True)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(16, 64), nn.Sequential(*blocks), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(24):
        first = nn.functional.mse_loss(model(inputs[::2]), targets[::2])
        ((first + nn.functional.mse_loss(model(inputs[1::2]), targets[1::2])) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return first.item()
