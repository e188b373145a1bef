"""What a run has measured."""

from __future__ import annotations

from dataclasses import dataclass

from onecopy.report.states import StateBytes

__all__ = ["TrainResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run measured, equal on all ranks. Bits are per held-out byte, averaged over ranks."""

    stage: int | str
    is_quantized: bool
    node_sizes: tuple[int, ...]  # how many ranks each node has
    held_out_bits: dict[int, float]  # by the number of steps done
    unigram_bits: float
    num_parameters: int  # of the model
    num_trained: int  # those of them that are trained
    padded_numel: int  # with the padding of its flat buffers
    memory: StateBytes | None  # of the rank that holds most; None if not measured
    bytes_per_step: dict[str, float]  # sent by a rank, by kind of event; empty if not measured
    across_per_step: float  # those of them that leave its node
    tokens_per_second: float  # of all ranks together; 0 if not measured
    seconds: float  # with those of the runs that this one goes on from
    samples: tuple[str, ...]  # one for each prompt
    is_stopped: bool = False  # a signal has ended it early, with a checkpoint

    @property
    def node_size(self) -> int | None:
        """Ranks in each node; None where nodes differ, and formulas count rank by rank."""
        return self.node_sizes[0] if len(set(self.node_sizes)) == 1 else None

    @property
    def final_bits(self) -> float:
        """The held-out loss after the last step, in bits per byte."""
        return self.held_out_bits[max(self.held_out_bits)]
