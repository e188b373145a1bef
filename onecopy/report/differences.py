"""What differs between runs: settings, versions, and how they went."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from onecopy.report.progress import duration, size
from onecopy.report.run_folder import Setting
from onecopy.report.summary import Summary
from onecopy.report.verdict import number, percent, span

__all__ = ["differences", "settings_of", "written"]

NOTHING = "-"


def differences(runs: Sequence[Summary]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A name and a value for each run: first results, then settings that are not the same."""
    for name, result in RESULTS.items():
        values = tuple(result(run) for run in runs)
        if set(values) != {NOTHING}:
            yield name, values
    settings = [_circumstances(run) for run in runs]
    for name in dict.fromkeys(name for one in settings for name in one):
        values = tuple(one.get(name, NOTHING) for one in settings)
        if len(set(values)) > 1:
            yield name, values


def settings_of(run: Summary) -> dict[str, Setting]:
    """Each setting of the program and of its models."""
    found = dict(run.run.settings)
    for model in run.run.models:
        prefix = f"{model.name}: " if model.name else ""
        found.update((f"{prefix}{name}", one) for name, one in model.settings.items())
    return found


def written(value: object) -> str:
    """A setting's value: a word without quotes, of a policy what it says."""
    if isinstance(value, dict):
        said = {name: one for name, one in value.items() if one not in (None, [], "")}
        return ", ".join(f"{name}: {written(one)}" for name, one in said.items()) or "nothing"
    if isinstance(value, list):
        return ", ".join(map(written, value)) or "none"
    return value if isinstance(value, str) else repr(value)


def _circumstances(run: Summary) -> dict[str, str]:
    return {
        "ranks": f"{run.run.world_size:,}",
        "models": ", ".join(f"{one.kind}, {one.num_parameters:,}" for one in run.run.models),
        **{name: written(one.value) for name, one in settings_of(run).items()},
        **_prefixed("version of ", run.run.versions),
        **_prefixed("", run.run.environment),
    }


def _prefixed(prefix: str, found: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}{name}": value for name, value in found.items()}


def _last_loss(run: Summary) -> str:
    return NOTHING if run.loss is None else number(run.loss.means()[-1])


def _step(run: Summary) -> str:
    return NOTHING if run.step_seconds is None else span(run.step_seconds)


def _waiting(run: Summary) -> str:
    return percent(run.waiting) if run.shares else NOTHING


def _peak(run: Summary) -> str:
    peak = run.peak()
    return NOTHING if peak is None else size(peak)


def _states(run: Summary) -> str:
    totals = [one.states for one in run.ranks if one.states]
    return size(max(totals)) if totals else NOTHING


def _sent(run: Summary) -> str:
    sent = sum(run.sent()[0].values())
    return size(sent) if sent else NOTHING


RESULTS: dict[str, Callable[[Summary], str]] = {
    "status": lambda run: run.run.status,
    "steps": lambda run: f"{len(run.steps):,}",
    "took": lambda run: duration(run.run.seconds),
    "last loss": _last_loss,
    "a step, median": _step,
    "waiting for others": _waiting,
    "model states of a rank": _states,
    "most memory of a process": _peak,
    "sent by a rank in a step": _sent,
}
