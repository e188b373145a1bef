"""The trainer's options from a TOML file and from flags, and back into TOML.

This file owns which source counts: a flag, then the file, then the default; and where each value
came from. It must not import torch, see options.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterator
from dataclasses import Field
from pathlib import Path
from typing import Any

from onecopy.errors import ConfigError
from onecopy.training.options import TrainOptions

__all__ = ["read_settings", "to_toml"]

COMMAND_LINE = "command line"


def read_settings(config: Path | None = None, **flags: Any) -> TrainOptions:
    """The options that flags and a file make together, and in `origins` where each came from.

    Args:
        config: a TOML file with a table for each group of options, its keys spelled like flags
            with underscores: see `to_toml`.
        **flags: what the command line has given, by name.

    Raises:
        ConfigError: there is no such file, it is no TOML, a setting is unknown (with the nearest
            one, the file and the line) or its value does not fit.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, value, place in _in_file(config) if config is not None else ():
        values[name], origins[name] = value, place
    values |= flags
    origins |= dict.fromkeys(flags, COMMAND_LINE)
    return TrainOptions(**values, origins=origins)


def to_toml(options: TrainOptions) -> str:
    """All settings as TOML, which `read_settings` takes, each with where its value came from."""
    lines: list[str] = []
    for group in options.groups:
        lines += ["", f"[{group.table}]"]
        for item in group.own_fields():
            if not _is_in_file(item):
                continue
            value = getattr(options, item.name)
            # TOML has no word for nothing: what is none is left out, and said.
            setting = f"# {item.name} is none" if value is None else f"{item.name} = {_toml(value)}"
            origin = options.origin_of(item.name)
            lines.append(f"{setting}  # {origin}")
    return "\n".join(lines[1:]) + "\n"


def _in_file(path: Path) -> Iterator[tuple[str, Any, str]]:
    """(name, value, place) of each setting of a file."""
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise ConfigError(f"{path} is not TOML: {error}") from error
    groups = {group.table: group for group in TrainOptions.groups}
    hints = typing.get_type_hints(TrainOptions)
    for table, settings in tables.items():
        if not isinstance(settings, dict):
            raise ConfigError(
                f"{_place(path, text, None, table)}: {table!r} is in no table.{_advice(table)}"
            )
        if table not in groups:
            raise ConfigError(
                f"{_place(path, text, table, None)}: there is no table [{table}]. "
                f"The tables are {', '.join(f'[{one}]' for one in groups)}."
            )
        known = {item.name for item in groups[table].own_fields() if _is_in_file(item)}
        for name, value in settings.items():
            place = _place(path, text, table, name)
            if name not in known:
                raise ConfigError(
                    f"{place}: there is no setting {name!r} in [{table}].{_advice(name)}"
                )
            yield name, _fitting(value, hints[name], f"{place}: {name}"), place


def _is_in_file(item: Field[Any]) -> bool:
    return bool(item.metadata.get("in_file", True))


def _advice(name: str) -> str:
    """The setting of this name in another table, or else the nearest one, if there is one."""
    tables = {
        item.name: group.table for group, item in TrainOptions.settings() if _is_in_file(item)
    }
    near = difflib.get_close_matches(name, tables, n=1)
    if not near:
        return ""
    return f" Did you mean {near[0]!r} in [{tables[near[0]]}]?"


def _place(path: Path, text: str, table: str | None, name: str | None) -> str:
    """The file and the line where a setting is, or a table begins."""
    current = None
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line):
            current = header[1].strip("\"'")
            if name is None and current == table:
                return f"{path}:{number}"
        elif name is not None and current == table:
            key = line.partition("=")[0].strip().strip("\"'")
            if key == name:
                return f"{path}:{number}"
    return str(path)


def _fitting(value: Any, kind: Any, where: str) -> Any:
    """A value of TOML as the option has it: lists become tuples, and words paths.

    Raises:
        ConfigError: it is of another type.
    """
    if typing.get_origin(kind) is tuple:
        element = typing.get_args(kind)[0]
        listed = value if isinstance(value, list) else [value]
        return tuple(_fitting(one, element, where) for one in listed)
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for one in kinds:
        if one is Path and isinstance(value, str):
            return Path(value)
        if one is float and type(value) is int:
            return float(value)
        # A bool is an int to Python, and not to people.
        if type(value) is one:
            return value
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    wanted = " or ".join(
        words.get(one, "a text in quotes") for one in kinds if one is not type(None)
    )
    raise ConfigError(f"{where} is {json.dumps(value, default=str)}: give {wanted}.")


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Path):
        return json.dumps(str(value), ensure_ascii=False)
    # JSON's words, numbers and escapes are TOML's too.
    return json.dumps(value, ensure_ascii=False)
