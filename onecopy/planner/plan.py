"""A plan: what each stage takes, what fits, and what is recommended.

    plan = onecopy.plan("7.5B", devices=64)
    print(plan)

Closed formulas and the runtime's own layout, nothing is run: what a step does second by second is
not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from onecopy.config import STAGES
from onecopy.errors import ConfigError
from onecopy.planner.estimate import row_of
from onecopy.planner.options import PlanOptions
from onecopy.planner.recommend import Recommendation, advice_for, recommend
from onecopy.planner.rows import ALL_HOST, ALL_NVME, HOST, NVME, Question, Row, Way, offloads
from onecopy.planner.shapes import ModelShape
from onecopy.planner.sources import Origin, read_model
from onecopy.policies import TIERS, Precision

__all__ = ["Plan", "plan"]

# Of all ways to place states those that a table has a column for.
SHOWN = (None, HOST, ALL_HOST, NVME, ALL_NVME)


def plan(model: Any, **settings: Any) -> Plan:
    """What training `model` takes at each stage, and the fastest way that fits.

    Args:
        model: a number of parameters ("7.5B"), the path of a Hugging Face config.json or of a
            folder with one, "module:function" (called on the meta device), a config object of
            transformers, a module, or a function that returns one.
        settings: fields of `onecopy.planner.options.PlanOptions`: devices, devices_per_node,
            tensor, pipeline, device_memory, host_memory, nvme, nvme_read, nvme_write, host_link,
            node_link, network, device_tflops, sequence, micro_batch, accumulate, optimizer,
            precision, checkpoint_activations, stage, layers, hidden.

    Raises:
        ConfigError: the model cannot be found or built, or a setting does not fit.
    """
    options = PlanOptions.make(settings)
    shape, origin = read_model(model, options)
    if options.pipeline > max(shape.num_blocks, 1):
        raise ConfigError(
            f"--pipeline {options.pipeline}, but {shape.name} has {shape.num_blocks} blocks that "
            "are alike, which are what pipeline stages share: say fewer"
        )
    return Plan(question=Question(shape, options), origin=origin)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answers to a question; `print` shows it as the command does, a notebook as a page."""

    question: Question
    origin: Origin

    @property
    def model(self) -> ModelShape:
        """The model that was planned."""
        return self.question.shape

    @property
    def options(self) -> PlanOptions:
        """The circumstances."""
        return self.question.options

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One for each stage and tier; one more where what is recommended is none of them.

        Host memory is shown where its size is said, or where nothing fits on the devices; NVMe
        where its size is said, or where nothing fits into the host memory that was said.
        """
        found = self.recommended
        rows = self._of_stages
        if found is not None and found.row not in rows:
            rows = (*rows, found.row)
        # The sort is stable: within a tier they are in the order of stages.
        return tuple(sorted(rows, key=lambda row: TIERS.index(row.way.tier)))

    @cached_property
    def recommended(self) -> Recommendation | None:
        """The fastest way that fits; None where none does: see `advice`."""
        return recommend(self.question, self._all, self.origin)

    @property
    def advice(self) -> tuple[str, ...]:
        """What would help where nothing fits."""
        if self.recommended is not None:
            return ()
        return advice_for(self.question, self._all)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What was assumed."""
        notes = list(self.model.notes)
        limit = self.model.transformer.context if self.model.transformer else None
        sequence = self.question.batch.sequence
        if limit is not None and sequence > limit:
            notes.append(f"samples of {sequence} tokens are longer than the model's {limit}")
        return tuple(notes)

    @cached_property
    def _of_stages(self) -> tuple[Row, ...]:
        """Rows with activations kept, or computed again where that is needed."""
        shown = (row for row in self._all if row.way.offload in SHOWN)
        plain = (row for row in shown if row.way.policy == self.options.policy)
        alike = [list(rows) for _, rows in groupby(plain, key=_stage_and_tier)]
        return tuple(next((row for row in rows if row.fits), rows[-1]) for rows in alike)

    @cached_property
    def _all(self) -> list[Row]:
        rows = [self.question.row(way) for way in self._ways()]
        options = self.options
        if options.host_memory is not None or not any(row.fits for row in rows):
            rows += [self.question.row(way) for way in self._offloaded("host")]
        is_bounded = options.host_memory is not None and not any(row.fits for row in rows)
        if options.nvme is not None or is_bounded:
            rows += [self.question.row(way) for way in self._offloaded("nvme")]
        return rows

    def _offloaded(self, tier: str) -> Iterator[Way]:
        """The ways that keep states in host memory, or on NVMe."""
        # Split masters keep half of each in the parameters, on the device.
        ways = [way for way in self._ways() if not way.is_lean]
        if self.options.stage is None:
            # The table is wide enough.
            ways = [way for way in ways if way.stage in STAGES]
        for offload in offloads(tier, releases=True):
            for way in ways:
                if offload in offloads(tier, releases=row_of(way.stage).releases):
                    yield replace(way, offload=offload)

    def _ways(self) -> Iterator[Way]:
        """Every way to train on devices alone, for each stage the one that takes most first."""
        options = self.options
        stages = options.stages if options.stage is None else (options.stage,)
        choices = {"auto": (False, True), "off": (False,)}.get(
            options.checkpoint_activations, (True,)
        )
        if self.model.transformer is None and options.checkpoint_activations == "auto":
            # Nothing is known of activations, so nothing is known of what that would save.
            choices = (False,)
        for stage in stages:
            policies = [options.policy]
            # Split masters save something where 16-bit parameters stay.
            if options.policy == Precision(compute="bf16") and not row_of(stage).releases:
                policies.append(replace(options.policy, master="bf16+16"))
            for policy in policies:
                for again in choices:
                    yield Way(stage=stage, policy=policy, recompute=again)

    def to_json(self) -> dict[str, Any]:
        """All of it, ready for `json.dumps`; memory and messages in bytes."""
        found, batch = self.recommended, self.question.batch
        return {
            "model": {"name": self.model.name, "num_parameters": self.model.num_parameters},
            "options": {**asdict(self.options), "precision": asdict(self.options.policy)},
            "sequence": batch.sequence,
            "capacity": self.options.capacity,
            "capacity_per_node": {
                tier: self.options.capacity_of(tier) for tier in ("host", "nvme")
            },
            "rows": [_row_as_dict(row) for row in self.rows],
            "recommended": None
            if found is None
            else {
                **_row_as_dict(found.row),
                "toml": found.toml,
                "code": found.code,
                "reasons": list(found.reasons),
            },
            "advice": list(self.advice),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from onecopy.planner.show import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from onecopy.planner.page import as_html

        return as_html(self)


def _stage_and_tier(row: Row) -> tuple[object, ...]:
    return row.stage, row.way.tier, row.way.offload


def _row_as_dict(row: Row) -> dict[str, Any]:
    way = row.way
    return {
        "stage": row.stage,
        "recompute": way.recompute,
        "precision": asdict(way.policy),
        "offload": None if way.offload is None else asdict(way.offload),
        "tier": way.tier,
        "memory": {**row.memory.by_kind(), "total": row.memory.total},
        "at_peak": dict(row.memory.at_peak),
        "outside": {tier: {**asdict(one), "fits": one.fits} for tier, one in row.outside.items()},
        "moved": row.moved,
        "swapped": asdict(row.swapped),
        "seconds": asdict(row.seconds),
        "fits": row.fits,
        "fits_device": row.fits_device,
        "paper_state_bytes": row.paper,
        "sent": asdict(row.sent),
        "messages": float(row.elements.total),
        "messages_across": float(row.elements.across),
        "largest_model": row.largest,
    }
