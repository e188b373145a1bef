"""The `onecopy` command: parses, calls, prints.

This file owns subcommands, exit codes and how errors look. Flags and their help come from the
option records of the parts that do the work. Nothing here imports torch before it is needed, so
that `--help` and a mistyped option are answered at once.

Exit codes: 0 done, 1 failed, 2 wrong options, 130 stopped with Ctrl-C, 143 asked to end while
training, with a checkpoint saved.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import time
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from onecopy import __version__
from onecopy.checkpoint.options import ExportOptions, InspectOptions, VerifyOptions
from onecopy.deepspeed_config.options import FromDeepSpeedOptions
from onecopy.doctor.options import DoctorOptions
from onecopy.errors import ConfigError, OneCopyError
from onecopy.planner.options import CommandOptions
from onecopy.report.options import ReportOptions
from onecopy.training.options import TrainOptions
from onecopy.training.options.group import OptionGroup
from onecopy.training.settings_file import read_settings

if TYPE_CHECKING:
    from onecopy.planner.plan import Plan
    from onecopy.report.progress import ProgressLine
    from onecopy.simulator.rehearsal import Rehearsal


# What a shell says of a process that SIGTERM has ended.
STOPPED = 143


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand: `options` is a dataclass whose fields become arguments, `run` gets an instance.

    Fields with a default become flags, those without positional arguments. `make` gets what was
    given and makes the instance; by default that is `options` itself. What `run` returns is the
    exit code, None is 0.
    """

    name: str
    summary: str
    description: str
    options: type[Any]
    run: Callable[[Any], int | None]
    make: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommandGroup:
    """Subcommands under a common name."""

    name: str
    summary: str
    description: str
    commands: tuple[Command, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (sys.argv without them) and return the exit code."""
    parser = build_parser()
    chosen = vars(parser.parse_args(arguments))
    command: Command = chosen.pop("command")
    prog = chosen.pop("prog")
    try:
        make = command.make or command.options
        return command.run(make(**chosen)) or 0
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except OneCopyError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        advice = "needs torch, which is not installed here: pip install torch"
        print(f"{prog}: {advice}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: stopped", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands. Its result has `command` and one value per option."""
    parser = _Parser(
        prog="onecopy",
        description="ZeRO for PyTorch: one copy of the model states over all ranks.",
    )
    parser.add_argument("--version", action="version", version=f"onecopy {__version__}")
    _add_commands(parser, COMMANDS)
    return parser


def _add_commands(
    parser: argparse.ArgumentParser, commands: Iterable[Command | CommandGroup]
) -> None:
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in commands:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            allow_abbrev=False,
        )
        if isinstance(command, CommandGroup):
            _add_commands(subparser, command.commands)
        else:
            subparser.set_defaults(command=command, prog=subparser.prog)
            _add_options(subparser, command.options)


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors name the nearest option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._subparsers_by_name: dict[str, argparse.ArgumentParser] = {}

    def error(self, message: str) -> NoReturn:
        """Print `message` and where help is, and exit with 2; help itself where nothing is said."""
        if message.endswith(" COMMAND"):
            self.exit(2, self.format_help())
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
    # Without the dashes, which all of them share and which make short names look alike.
    words = [one.removeprefix("--") for one in known if one.startswith("--")]
    near = difflib.get_close_matches(name.lstrip("-"), words, n=1)
    hint = f" Did you mean --{near[0]}?" if near else ""
    return f"there is no option {name}.{hint}"


def _add_options(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    hints = typing.get_type_hints(options)
    groups: tuple[type[OptionGroup], ...] = getattr(options, "groups", ())
    if not groups:
        for field in dataclasses.fields(options):
            _add_option(parser, field, hints[field.name])
        return
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="read settings from this TOML file; flags override them (default: none)",
    )
    # What is not given is not a value: the file may have one.
    for group in groups:
        section = parser.add_argument_group(f"{group.title}, [{group.table}] in the file")
        for field in group.own_fields():
            _add_option(section, field, hints[field.name], default=argparse.SUPPRESS)


def _add_option(
    parser: argparse._ActionsContainer,  # the only name for a parser or a group of one
    field: dataclasses.Field[Any],
    kind: Any,
    **given: Any,
) -> None:
    # argparse formats help texts with %.
    settings: dict[str, Any] = {"help": field.metadata["help"].replace("%", "%%")}
    if kind is not bool:
        settings["metavar"] = field.metadata["metavar"] or _element(kind).__name__.upper()
        settings["type"] = _element(kind)
    if field.default is dataclasses.MISSING:
        if typing.get_origin(kind) is tuple:
            settings |= {"action": _ExtendTuple, "nargs": "+", "default": ()}
        parser.add_argument(field.name, **settings)
        return
    if given and field.default is None:
        settings["type"] = _or_none(_element(kind))
    settings["help"] += f" (default: {_shown(field.default)})".replace("%", "%%")
    if kind is bool:
        # Only where a file may have said yes is there something to say no to.
        settings["action"] = argparse.BooleanOptionalAction if given else "store_true"
    elif field.metadata["choices"]:
        choices = field.metadata["choices"]
        # "none" is no choice; what is neither is the record's to answer.
        is_optional = given and field.default is None
        shown = (*choices, None) if is_optional else choices
        settings["choices"] = None if is_optional else choices
        settings["metavar"] = "{" + ",".join(map(_shown, shown)) + "}"
    if typing.get_origin(kind) is tuple:
        settings["action"], settings["nargs"] = _ExtendTuple, "+"
    flag = "--" + field.name.replace("_", "-")
    parser.add_argument(flag, **{"default": field.default, **settings, **given})


class _ExtendTuple(argparse.Action):
    """Collects the values of an option that takes several and may be given more than once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, ())
        setattr(namespace, self.dest, (*before, *values))


def _element(kind: Any) -> Callable[[str], Any]:
    """The type that reads one value: of `tuple[Path, ...]` and of `Path | None` it is Path."""
    if kind in (int | str, int | str | None):
        return _number_or_word
    if typing.get_origin(kind) in (tuple, types.UnionType):
        element: Callable[[str], Any] = typing.get_args(kind)[0]
        return element
    reads: Callable[[str], Any] = kind
    return reads


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def read_or_none(text: str) -> Any:
        return None if text == "none" else read(text)

    read_or_none.__name__ = read.__name__  # argparse says it of what cannot be read
    return read_or_none


def _number_or_word(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _shown(default: Any) -> str:
    if default is None or default == ():
        return "none"
    if default is False:
        return "off"
    if isinstance(default, tuple):
        return " ".join(map(str, default)).strip()
    return str(default)


def _train(options: TrainOptions) -> int | None:
    from contextlib import nullcontext

    from onecopy.launcher import in_launched_process, launch, was_restarted
    from onecopy.report.progress import leave_live_line
    from onecopy.report.run_folder import RUN_FILE
    from onecopy.training.data import find_files
    from onecopy.training.stop import passed_on
    from onecopy.training.trainer import train

    if options.dry_run:
        from onecopy.training.dry_run import dry_run

        dry_run(options)
        return None
    # Said here once, rather than by every rank.
    find_files(options.data)
    find_files(options.eval_data)
    goes_on = options.checkpoint or was_restarted()
    if options.record and not goes_on and (options.record / RUN_FILE).exists():
        raise ConfigError(f"--record {options.record} holds a run already: give another folder.")
    if options.nproc == 1 or in_launched_process():
        return STOPPED if train(options).is_stopped else None
    try:
        # With checkpoints, ranks that are asked to end save one first.
        with passed_on() if options.checkpoint else nullcontext():
            result = launch(train, options.nproc, options)[0]
    except BaseException:
        leave_live_line()
        raise
    return STOPPED if result.is_stopped else None


def _inspect_checkpoint(options: InspectOptions) -> None:
    import json

    from rich.console import Console

    from onecopy.checkpoint.inspect import inspect
    from onecopy.checkpoint.tables import print_inspection

    found = inspect(options.folder)
    if options.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print_inspection(Console(), found)


def _export_checkpoint(options: ExportOptions) -> None:
    from rich.console import Console

    from onecopy.checkpoint.export import export
    from onecopy.checkpoint.tables import print_line
    from onecopy.options import bytes_of
    from onecopy.report.progress import ProgressLine, size

    console = Console()
    with ProgressLine(console) as line:
        done = export(
            options.folder,
            options.output,
            dtype=options.dtype,
            max_shard_bytes=bytes_of(options.max_shard_size),
            model=options.model,
            progress=_shown_on(line, "written"),
        )
    for name in done.left_out:
        print_line(console, f"left out, as it is no tensor: {name}")
    print_line(console, f"{options.output}: {size(done.num_bytes)} in {len(done.files)} files")


def _verify_checkpoint(options: VerifyOptions) -> None:
    from rich.console import Console

    from onecopy.checkpoint.tables import print_verification
    from onecopy.checkpoint.verify import verify
    from onecopy.errors import CheckpointError
    from onecopy.report.progress import ProgressLine

    console = Console()
    with ProgressLine(console) as line:
        found = verify(options.folder, every=options.all, progress=_shown_on(line, "read"))
    for one in found:
        print_verification(console, one)
    damaged = [one.path.name for one in found if one.problems]
    if damaged:
        raise CheckpointError(f"{options.folder} is damaged ({', '.join(damaged)}), see above")


def _shown_on(line: ProgressLine, verb: str) -> Callable[[int, int, str], None]:
    """Shows the bytes that are done, those in all, and what is being done."""
    from onecopy.report.progress import Transfer

    begin = time.monotonic()

    def show(num_bytes: int, total_bytes: int, name: str) -> None:
        line.show(
            Transfer(
                verb=verb,
                num_bytes=num_bytes,
                total_bytes=total_bytes,
                name=name,
                seconds=time.monotonic() - begin,
            )
        )

    return show


def _plan(options: CommandOptions) -> None:
    from onecopy.planner.largest import LARGEST
    from onecopy.planner.plan import plan

    if options.html and not options.html.parent.is_dir():
        raise ConfigError(f"--html {options.html}: make the folder first.")
    if options.model == LARGEST:
        _plan_largest(options)
        return
    # A function of the user's is found from where the command is started, as with python -m.
    sys.path.insert(0, "")
    found = plan(options.model, **options.settings)
    rehearsal = _rehearse(found, options) if options.simulate else None
    from onecopy.simulator import playback

    if options.html:
        from onecopy.planner.page import as_page

        more = () if rehearsal is None else (playback.as_html(rehearsal),)
        options.html.write_text(as_page(found, *more), encoding="utf-8")
    if options.json:
        import json

        more_json = {} if rehearsal is None else {"simulation": playback.to_json(rehearsal)}
        print(json.dumps({**found.to_json(), **more_json}, indent=2))
        return
    from rich.console import Console

    from onecopy.planner.show import print_plan

    print_plan(Console(), found)
    if rehearsal is not None:
        playback.print_rehearsal(Console(), rehearsal)


def _plan_largest(options: CommandOptions) -> None:
    from onecopy.planner.largest import largest_models

    if options.simulate:
        raise ConfigError("--simulate runs a step of one model: give that instead of largest.")
    found = largest_models(**options.settings)
    if options.html:
        from onecopy.planner.page import as_page_of_largest

        page = as_page_of_largest(options.settings, found)
        options.html.write_text(page, encoding="utf-8")
    if options.json:
        import json

        print(json.dumps([one.to_json() for one in found], indent=2))
        return
    from rich.console import Console

    from onecopy.planner.show import print_largest

    print_largest(Console(), options.settings, found)


def _rehearse(found: Plan, options: CommandOptions) -> Rehearsal:
    from onecopy.simulator.rehearsal import rehearse

    return rehearse(found, options.model, options.batch)


def _doctor(options: DoctorOptions) -> int:
    import json
    from contextlib import nullcontext

    from rich.console import Console

    from onecopy.doctor.environment import is_first_rank, silence_torch

    silence_torch()
    from onecopy.doctor.examine import examine
    from onecopy.doctor.show import print_examination, print_findings

    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    # Of all ranks on a terminal, one shows that something is going on.
    with errors.status("looking and testing") if is_first_rank() else nullcontext():
        found = examine(options)
    if found.facts is None:
        # A rank whose findings the first one may not hear of. It must not end that one by failing.
        if found.is_shown:
            print_findings(errors, found.findings)
        return 0
    text = json.dumps(found.to_json(), indent=2)
    if options.json is not None and options.is_json_to_file:
        options.json.write_text(text + "\n", encoding="utf-8")
    if options.json is None or options.is_json_to_file:
        print_examination(console, found)
    else:
        print(text)
    return int(found.has_problem)


def _report(options: ReportOptions) -> None:
    from onecopy.report.show import report

    report(options)


def _config_from_deepspeed(options: FromDeepSpeedOptions) -> None:
    import json

    from rich.console import Console

    from onecopy.deepspeed_config import convert
    from onecopy.report.conversion import print_conversion, to_json

    found = convert(options.file, world_size=options.world)
    if options.json:
        print(json.dumps(to_json(found), indent=2))
    else:
        print_conversion(Console(highlight=False), found)
    found.raise_if_refused()


COMMANDS = (
    Command(
        name="doctor",
        summary="look at this machine, test what ranks send each other, and say what to change",
        description="Shows versions, processors, memory, accelerators, networks and disks, sends "
        "between two ranks what training would send, compares a training step with one process, "
        "and says what to change. Under torchrun it tests torchrun's ranks, on all machines. Exits "
        "with 1 if something will not work.",
        options=DoctorOptions,
        run=_doctor,
    ),
    Command(
        name="train",
        summary="train a language model on text: a small GPT, or one of Hugging Face's",
        description="Trains a language model on text and shows, beside the loss, the memory of "
        "model states and the bytes sent, measured and by formula. Without an option it is a small "
        "GPT on text that Python ships. Under torchrun it joins torchrun's processes; else it "
        "starts its own. All settings can be in one TOML file: --dry-run shows it.",
        options=TrainOptions,
        make=read_settings,
        run=_train,
    ),
    Command(
        name="plan",
        summary="say what a model needs at each stage, what fits, and what to choose",
        description="Calculates, before anything is started, the memory of each rank and the bytes "
        "that it sends at each stage, the largest model that fits, and the fastest configuration "
        "that does, as code to paste.",
        options=CommandOptions,
        run=_plan,
    ),
    Command(
        name="report",
        summary="write a page about runs: loss, memory, time and traffic, beside the formulas",
        description="Reads the folders of runs (onecopy.record), also while they run or after they "
        "were killed, and writes one page about them, which needs nothing else: what limits a "
        "run, memory and bytes sent beside what was estimated, where a step's time goes, and how "
        "several runs differ.",
        options=ReportOptions,
        run=_report,
    ),
    CommandGroup(
        name="config",
        summary="make settings from the configuration of another library",
        description="Reads the configuration of another library, and says what becomes of it.",
        commands=(
            Command(
                name="from-deepspeed",
                summary="say what becomes of each key of a ds_config.json, and print code to paste",
                description="Shows for each key of DeepSpeed's JSON what it is mapped to, what is "
                "left to you, or why it is ignored or refused, and prints the call of shard, the "
                "optimizer, the scheduler and the loop as code. Exits with 2 where something is "
                "refused.",
                options=FromDeepSpeedOptions,
                run=_config_from_deepspeed,
            ),
        ),
    ),
    CommandGroup(
        name="checkpoint",
        summary="look at checkpoints, check them, and make safetensors files of them",
        description="Works on checkpoints in this one process, without a process group and "
        "without an accelerator.",
        commands=(
            Command(
                name="inspect",
                summary="show what a checkpoint holds",
                description="Shows steps, models, optimizers and files of a checkpoint, or of the "
                "last good one of a run, without reading tensors.",
                options=InspectOptions,
                run=_inspect_checkpoint,
            ),
            Command(
                name="export",
                summary="write the model as safetensors files, for from_pretrained",
                description="Writes the model of a checkpoint as Hugging Face's safetensors files, "
                "with its configuration where it is known. One tensor is in memory at a time.",
                options=ExportOptions,
                run=_export_checkpoint,
            ),
            Command(
                name="verify",
                summary="read a checkpoint and compare every checksum",
                description="Reads every item of a checkpoint, compares its checksum, and looks "
                "whether all parts of each tensor are there. Exits with 1 if something is damaged.",
                options=VerifyOptions,
                run=_verify_checkpoint,
            ),
        ),
    ),
)
