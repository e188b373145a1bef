"""The trainer's options: one record from which the command line and its help are made.

This file owns names, defaults, help texts and the checks that need no data. It must not import
torch, so that `onecopy train --help` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from onecopy.config import AUTO, HYBRIDS, STAGES, ZEROPP, Config
from onecopy.errors import ConfigError
from onecopy.options import check_choices, check_least, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Everything `onecopy train` can be told. Raises ConfigError for values that cannot work."""

    stage: int | str = field(
        default=3,
        metadata=describe(
            "what to cut over the ranks: 0 nothing, 1 optimizer states, 2 gradients too, "
            "3 parameters too; mics, hfsdp and hpz cut some inside nodes; auto the stage that "
            "sends least of those that fit",
            choices=(*STAGES, *HYBRIDS, AUTO),
        ),
    )
    node_size: int | None = field(
        default=None,
        metadata=describe(
            "how many processes are in one node; without it, what torchrun says", metavar="N"
        ),
    )
    quantize: str | None = field(
        default=None,
        metadata=describe(
            "send parameters and gradients in fewer bits: zero++ as the paper does, auto where "
            "the network is slow enough; without it, as they are",
            choices=(ZEROPP, AUTO),
        ),
    )
    memory: str | None = field(
        default=None,
        metadata=describe(
            "with --stage auto: what one process can hold, such as 80GiB; without it, what its "
            "accelerator has",
            metavar="SIZE",
        ),
    )
    nproc: int = field(
        default=2,
        metadata=describe(
            "processes to start on this machine; ignored under torchrun, which starts its own"
        ),
    )
    precision: str = field(
        default="fp32",
        metadata=describe(
            "dtype of forward and backward; the optimizer always updates fp32 masters",
            choices=("fp32", "bf16", "fp16"),
        ),
    )
    device: str = field(
        default="auto",
        metadata=describe(
            "auto takes one accelerator per process where there are enough, else the CPU",
            choices=("auto", "cpu"),
        ),
    )
    data: tuple[Path, ...] = field(
        default=(),
        metadata=describe(
            "UTF-8 text files, or folders of .txt files, to train on; without it, the reference "
            "texts that Python ships for its help() command",
            metavar="PATH",
        ),
    )
    steps: int = field(default=260, metadata=describe("optimizer steps"))
    batch: int = field(default=12, metadata=describe("sequences per process and backward"))
    accumulate: int = field(default=1, metadata=describe("backwards per optimizer step"))
    context: int = field(default=96, metadata=describe("bytes of text that the model sees at once"))
    layers: int = field(default=3, metadata=describe("transformer blocks"))
    width: int = field(
        default=128, metadata=describe("size of the vector that stands for one byte")
    )
    heads: int = field(default=4, metadata=describe("attention heads; must divide the width"))
    lr: float = field(
        default=3e-3, metadata=describe("highest learning rate, reached after the warm-up")
    )
    warmup: float = field(
        default=0.1, metadata=describe("share of the steps in which the learning rate rises")
    )
    weight_decay: float = field(default=0.1, metadata=describe("AdamW's weight decay"))
    max_grad_norm: float = field(
        default=1.0, metadata=describe("clip the global gradient norm to this; 0 does not clip")
    )
    seed: int = field(default=0, metadata=describe("seeds weights, batches and the sample"))
    evals: int = field(
        default=5, metadata=describe("times the held-out loss is measured during training")
    )
    sample: int = field(
        default=200, metadata=describe("bytes of text to write at the end; 0 writes none")
    )
    quiet: bool = field(default=False, metadata=describe("show only the results, no progress"))
    record: Path | None = field(
        default=None,
        metadata=describe(
            "record the run in this folder, a new one: where time, bytes and memory go, and the "
            "losses; `onecopy report DIR` makes a page of it. A run that is resumed goes on in its "
            "folder",
            metavar="DIR",
        ),
    )

    trace: int = field(
        default=0,
        metadata=describe(
            "with --record: look closely at so many steps, from the second on, and write them as "
            "DIR/trace.json, a trace of all ranks to open at https://ui.perfetto.dev",
            metavar="N",
        ),
    )

    checkpoint: Path | None = field(
        default=None,
        metadata=describe(
            "folder for checkpoints, on storage that all processes share; a run that finds its own "
            "there goes on from the latest good one, on any number of processes",
            metavar="DIR",
        ),
    )
    save_every: int = field(
        default=50,
        metadata=describe(
            "steps between checkpoints; the last step is always saved", metavar="STEPS"
        ),
    )
    keep: int = field(
        default=2,
        metadata=describe(
            "checkpoints to keep; with one, there is none to fall back on", metavar="N"
        ),
    )

    def __post_init__(self) -> None:
        check_least(self, _LEAST)
        check_choices(self)
        # Says what does not go together.
        Config(stage=self.stage, memory=self.memory, node_size=self.node_size)
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"--lr is {self.lr}: give a number above 0, such as 0.003.")
        if self.record is not None and self.record == self.checkpoint:
            raise ConfigError(
                f"--record and --checkpoint are both {self.record}: give two folders."
            )
        if self.trace and self.record is None:
            raise ConfigError(
                f"--trace is {self.trace} without --record DIR: say where it is to be."
            )
        if self.warmup > 1:
            raise ConfigError(
                f"--warmup is {self.warmup}: it is a share of the steps, between 0 and 1."
            )
        if self.width % self.heads:
            raise ConfigError(_heads_advice(self.width, self.heads))


_LEAST: dict[str, float] = {
    "nproc": 1,
    "node_size": 1,
    "trace": 0,
    # The first step creates the optimizer's states, so memory can be measured from the second on.
    "steps": 2,
    "batch": 1,
    "accumulate": 1,
    "context": 2,
    "layers": 1,
    "width": 1,
    "heads": 1,
    "warmup": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "evals": 1,
    "sample": 0,
    "seed": 0,
    "save_every": 1,
    "keep": 1,
}

# What the losses of a run depend on, beside the text and the number of sequences in a step: a run
# that is resumed must have the same. All other options may change.
OF_A_RUN = (
    "steps",
    "context",
    "layers",
    "width",
    "heads",
    "lr",
    "warmup",
    "weight_decay",
    "max_grad_norm",
    "seed",
)


def _heads_advice(width: int, heads: int) -> str:
    divisors = [n for n in range(1, min(width, 64) + 1) if width % n == 0]
    nearest = min(divisors, key=lambda n: abs(n - heads))
    return (
        f"--width {width} cannot be split over --heads {heads}: each head takes an equal part "
        f"of the width. Try --heads {nearest}."
    )
