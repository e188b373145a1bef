"""The `onecopy` command: parses, calls, prints.

This file owns subcommands, exit codes and how errors look. Flags and their help come from the
option records of the parts that do the work. Nothing here imports torch before it is needed, so
that `--help` and a mistyped option are answered at once.

Exit codes: 0 done, 1 failed, 2 wrong options, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from onecopy.errors import ConfigError, OneCopyError
from onecopy.training.options import TrainOptions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand: `options` is a dataclass whose fields become flags, `run` gets an instance."""

    name: str
    summary: str
    description: str
    options: type[Any]
    run: Callable[[Any], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (sys.argv without them) and return the exit code."""
    parser = build_parser()
    chosen = vars(parser.parse_args(arguments))
    command: Command = chosen.pop("command")
    try:
        command.run(command.options(**chosen))
    except ConfigError as error:
        print(f"onecopy {command.name}: {error}", file=sys.stderr)
        return 2
    except OneCopyError as error:
        print(f"onecopy {command.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"onecopy {command.name}: stopped", file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands. Its result has `command` and one value per option."""
    parser = _Parser(
        prog="onecopy",
        description="ZeRO for PyTorch: one copy of the model states over all ranks.",
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            allow_abbrev=False,
        )
        subparser.set_defaults(command=command)
        _add_options(subparser, command.options)
    return parser


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors name the nearest option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._subparsers_by_name: dict[str, argparse.ArgumentParser] = {}

    def error(self, message: str) -> NoReturn:
        """Print `message` and where help is, and exit with 2."""
        self.exit(2, f"{self.prog}: {message}\nSee {self.prog} --help.\n")

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads for each namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As inherited, but unknown options end here, where this parser's own are known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(_unknown(unknown[0], list(self._option_string_actions)))
        return found, unknown


def _unknown(argument: str, known: list[str]) -> str:
    name = argument.split("=")[0]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"there is no option {name}.{hint}"


def _add_options(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        flag = "--" + field.name.replace("_", "-")
        default = _shown(field.default)
        settings: dict[str, Any] = {
            "default": field.default,
            # argparse formats help texts with %.
            "help": f"{field.metadata['help']} (default: {default})".replace("%", "%%"),
        }
        kind = hints[field.name]
        if kind is bool:
            settings["action"] = "store_true"
        else:
            settings["metavar"] = field.metadata["metavar"] or _element(kind).__name__.upper()
            settings["type"] = _element(kind)
            if field.metadata["choices"]:
                settings["choices"] = field.metadata["choices"]
                settings["metavar"] = None
        if typing.get_origin(kind) is tuple:
            settings["action"], settings["nargs"] = _ExtendTuple, "+"
        parser.add_argument(flag, **settings)


class _ExtendTuple(argparse.Action):
    """Collects the values of an option that takes several and may be given more than once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), *values))


def _element(kind: Any) -> Callable[[str], Any]:
    """The type that reads one value: of `tuple[Path, ...]` and of `Path | None` it is Path."""
    if typing.get_origin(kind) in (tuple, types.UnionType):
        element: Callable[[str], Any] = typing.get_args(kind)[0]
        return element
    reads: Callable[[str], Any] = kind
    return reads


def _shown(default: Any) -> str:
    if default is None or default == ():
        return "none"
    if default is False:
        return "off"
    return str(default)


def _train(options: TrainOptions) -> None:
    from onecopy.launcher import in_launched_process, launch
    from onecopy.report.progress import leave_live_line
    from onecopy.training.data import find_files
    from onecopy.training.trainer import train

    # Said here once, rather than by every rank.
    find_files(options.data)
    if options.events and not options.events.parent.is_dir():
        raise ConfigError(f"--events {options.events}: make the folder first.")
    if options.nproc == 1 or in_launched_process():
        train(options)
        return
    try:
        launch(train, options.nproc, options)
    except BaseException:
        leave_live_line()
        raise


COMMANDS = (
    Command(
        name="train",
        summary="train a small GPT on text, and show memory and traffic beside the formulas",
        description="Trains a byte-level GPT on text and shows, beside the loss, the memory of "
        "model states and the bytes sent, measured and by formula. Under torchrun it joins "
        "torchrun's processes; else it starts its own.",
        options=TrainOptions,
        run=_train,
    ),
)
