"""From what the user names to a `ModelShape`: a size, a config, a function, or a model.

Sizes and configs of known families are arithmetic. Everything else is built on the meta device,
where tensors have shapes and no memory, and grouped into units by the runtime itself; torch is
imported for that alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from onecopy.errors import ConfigError
from onecopy.extras import missing
from onecopy.planner import families, saved
from onecopy.planner.families import Numbers
from onecopy.planner.shapes import ModelShape, Stack, TransformerShape, UnitShape
from onecopy.planner.sizes import is_parameters, parse_parameters, shown

if TYPE_CHECKING:
    from torch import nn

    from onecopy.planner.options import PlanOptions

__all__ = ["Origin", "builder_of", "import_function", "is_size", "read_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """How code gets the model: lines to import, the expression that builds it.

    is_hugging_face: it has transformers' methods.
    """

    imports: tuple[str, ...] = ()
    build: str = "build_model()  # your function that returns the model"
    is_hugging_face: bool = False


def read_model(model: Any, options: PlanOptions) -> tuple[ModelShape, Origin]:
    """The shape of what `model` names, and how code builds it.

    Args:
        model: a size ("7.5B"), the path of a Hugging Face config or of a folder with one,
            "module:function", a config object of transformers, a module, or a function that
            returns one.

    Raises:
        ConfigError: it names nothing, or the model cannot be built.
    """
    if isinstance(model, int) and not isinstance(model, bool):
        model = str(model)
    if isinstance(model, str | Path):
        return _from_text(str(model), options)
    if hasattr(model, "to_dict") and hasattr(model, "model_type"):
        return _from_config(model.to_dict(), type(model).__name__, options, None)
    if hasattr(model, "named_parameters") and not isinstance(model, type):
        return _from_module(model, type(model).__name__, options, Origin())
    if callable(model):
        name = getattr(model, "__name__", type(model).__name__)
        return _from_module(_built(model, name), name, options, Origin())
    raise ConfigError(
        f"a plan of {model!r}: give a size ('7.5B'), the path of a config.json, 'module:function', "
        "a module, or a function that returns one."
    )


def is_size(text: str) -> bool:
    """Whether a model is given by its size alone."""
    return not Path(text).expanduser().exists() and is_parameters(text)


def builder_of(model: Any) -> Callable[[], nn.Module]:
    """A function that builds the model where it is called, not on the meta device.

    Args:
        model: as for `read_model`, but no size.

    Raises:
        ConfigError: there is nothing to build.
    """
    if hasattr(model, "to_dict") and hasattr(model, "model_type"):
        return lambda: _model_of(model.to_dict())
    if isinstance(model, str | Path):
        path = Path(model).expanduser()
        if path.exists():
            return lambda: _model_of(_read_config(path)[0])
        return lambda: import_function(str(model))()
    if callable(model) and not hasattr(model, "named_parameters"):
        return model  # type: ignore[no-any-return]
    raise ConfigError(
        f"a simulation builds the model itself, and a {type(model).__name__} is there already: "
        "give the function that builds it"
    )


def _from_text(text: str, options: PlanOptions) -> tuple[ModelShape, Origin]:
    path = Path(text).expanduser()
    if path.exists():
        return _from_path(path, options)
    if is_size(text):
        return _from_size(parse_parameters(text), options), Origin()
    looks_like_a_path = text.endswith(".json") or "/" in text or "\\" in text
    if ":" in text and not looks_like_a_path:
        return _from_import(text, options)
    raise ConfigError(
        f"there is no file or folder {text!r}. Give a size (7.5B), a Hugging Face config.json or "
        "a folder with one (models on the hub: download the config first), or module:function."
    )


# Sizes ------------------------------------------------------------------------------------------

# Published models of one to some hundred billion parameters are 85 to 128 times as wide as deep.
WIDTH_OVER_DEPTH = 128


def _from_size(numel: int, options: PlanOptions) -> ModelShape:
    layers, hidden = options.layers, options.hidden
    notes: tuple[str, ...] = ()
    if layers is None or hidden is None:
        layers, hidden = _usual_shape(numel, layers, hidden)
        notes = (
            f"assumed {layers} blocks of width {hidden:,}, as is usual at this size: --layers and "
            "--hidden say it better, a config.json says all",
        )
    block = families.gpt_block(hidden)
    rest = numel - layers * sum(block)
    if rest < 0:
        # Blocks that are lighter than GPT's.
        block = (numel // layers,)
        rest = numel - layers * block[0]
    units = [UnitShape(name="blocks", numels=block, count=layers)]
    if rest:
        units.insert(0, UnitShape(name="embedding and rest", numels=(rest,)))
    shape = ModelShape(name=f"{shown(numel)} parameters", units=tuple(units), notes=notes)
    notes = (*notes, "the vocabulary is not known, so logits are not among the activations")
    return replace(shape, transformer=_gpt(layers, hidden), notes=notes)


def _usual_shape(numel: int, layers: int | None, hidden: int | None) -> tuple[int, int]:
    """Layers and hidden of 12 layers hidden^2 parameters, where at least one is not known."""
    if layers is None and hidden is None:
        layers = max(1, round((numel / (12 * WIDTH_OVER_DEPTH**2)) ** (1 / 3)))
    if layers is None:
        assert hidden is not None, "one of the two is known here"
        return max(1, round(numel / (12 * hidden**2))), hidden
    if hidden is None:
        hidden = max(64, int((numel / (12 * layers)) ** 0.5) // 64 * 64)
    return layers, hidden


def _gpt(layers: int, hidden: int) -> TransformerShape:
    """GPT blocks without dropout, their vocabulary unknown."""
    kept = saved.layer_norm(hidden) + saved.layer_norm(hidden)
    kept += saved.attention(hidden, hidden, max(1, hidden // 128)) + saved.mlp(4 * hidden, "gelu")
    stack = Stack(count=layers, hidden=hidden, widest=4 * hidden, saved=kept)
    return TransformerShape(stacks=(stack,), outside=saved.layer_norm(hidden))


# Configs ----------------------------------------------------------------------------------------


def _from_path(path: Path, options: PlanOptions) -> tuple[ModelShape, Origin]:
    config, name = _read_config(path)
    return _from_config(config, name, options, path)


def _read_config(path: Path) -> tuple[dict[str, Any], str]:
    """A config of transformers, and what to call its model."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"there is no config.json in {path}: give the folder that save_pretrained has written, "
            "or a config file itself."
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error}).") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigError(
            f"{file} has no model_type: it is not the config of a Hugging Face model. Give "
            "module:function for a model of your own."
        )
    return config, file.parent.resolve().name if file.name == "config.json" else file.stem


def _from_config(
    config: Mapping[str, Any], name: str, options: PlanOptions, path: Path | None
) -> tuple[ModelShape, Origin]:
    family = families.family_of(config)
    keeps_fp32 = options.policy.keep_fp32 or (family, options.policy.compute) == ("t5", "fp16")
    if family is not None and not keeps_fp32:
        shape = families.shape_of(family, name, config)
        model_class = families.FAMILIES[family].model_class
    else:
        model, model_class = _meta_model(config)
        shape = _shape_of_module(model, name, options)
    if path is None:
        return shape, Origin(is_hugging_face=True)
    where = str(path)
    return shape, Origin(
        imports=(f"from transformers import AutoConfig, {model_class}",),
        build=f"{model_class}(AutoConfig.from_pretrained({json.dumps(where)}))",
        is_hugging_face=True,
    )


def _meta_model(config: Mapping[str, Any]) -> tuple[nn.Module, str]:
    """transformers' own model of a config, on the meta device, and its class's name."""
    import torch

    with torch.device("meta"):
        model = _model_of(config)
    return model, type(model).__name__


def _model_of(config: Mapping[str, Any]) -> nn.Module:
    """transformers' own model of a config."""
    kind = config["model_type"]
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{missing('transformers', f'a model of type {kind!r}, counted by building it,')}. "
            f"Without it: {', '.join(families.FAMILIES)}, or a size."
        ) from error
    try:
        made = transformers.AutoConfig.for_model(
            kind, **{key: value for key, value in config.items() if key != "model_type"}
        )
        model = _build(transformers, made, config)
    except Exception as error:
        # Whatever a model's constructor raises is the user's to read.
        why = str(error).partition("\n")[0]
        raise ConfigError(
            f"transformers {transformers.__version__} cannot build a model of type {kind!r} "
            f"({why[:300]}). A newer version may know it; a model of your own can be planned as "
            "module:function."
        ) from error
    return model


# Tried in this order where a config does not name the class.
AUTO_CLASSES = ("CausalLM", "Seq2SeqLM", "MaskedLM")


def _build(transformers: Any, made: Any, config: Mapping[str, Any]) -> nn.Module:
    """The model of the class that the config names, else of the one that predicts tokens."""
    family = families.FAMILIES.get(config["model_type"])
    classes = config.get("architectures") or ([family.model_class] if family else [])
    if classes and hasattr(transformers, classes[0]):
        return cast("nn.Module", getattr(transformers, classes[0])(made))
    for purpose in AUTO_CLASSES:
        try:
            auto = getattr(transformers, f"AutoModelFor{purpose}")
            return cast("nn.Module", auto.from_config(made))
        except ValueError:
            # No such class for this family.
            continue
    return cast("nn.Module", transformers.AutoModel.from_config(made))


# Functions and modules --------------------------------------------------------------------------


def _from_import(text: str, options: PlanOptions) -> tuple[ModelShape, Origin]:
    found = import_function(text)
    module_name, _, path = text.partition(":")
    origin = Origin(imports=(f"import {module_name}",), build=f"{module_name}.{path}()")
    return _from_module(_built(found, text), text, options, origin)


def import_function(text: str) -> Callable[[], Any]:
    """What "module:function" names.

    Raises:
        ConfigError: it cannot be imported, or is no function.
    """
    from importlib import import_module

    module_name, _, path = text.partition(":")
    try:
        found: Any = import_module(module_name)
    except Exception as error:
        # Importing runs the user's code, which may raise anything.
        raise ConfigError(
            f"{text}: importing {module_name} failed ({type(error).__name__}: {error}). The module "
            "must be found from the folder where the command is started."
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{text}: {module_name} has no {path!r}.")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{text} is a {type(found).__name__}, not a function or a class.")
    return found  # type: ignore[no-any-return]


def _built(build: Callable[[], Any], name: str) -> nn.Module:
    """What a function returns, called where tensors have no memory."""
    import torch

    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:
        # The user's function may raise anything.
        raise ConfigError(
            f"{name}() failed on the meta device ({type(error).__name__}: {error}). It is called "
            "without arguments and must build the model only, without reading tensors or moving "
            "them to a device."
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{name}() returned a {type(model).__name__}, not a torch.nn.Module.")
    return model


def _from_module(
    model: nn.Module, name: str, options: PlanOptions, origin: Origin
) -> tuple[ModelShape, Origin]:
    is_hugging_face = hasattr(model, "activation_checkpointing_enable")
    shape = _shape_of_module(model, name, options)
    return shape, replace(origin, is_hugging_face=is_hugging_face)


def _shape_of_module(model: nn.Module, name: str, options: PlanOptions) -> ModelShape:
    from onecopy.planner.modules import units_of

    units = units_of(model, options)
    if not any(sum(unit.numels) for unit in units):
        raise ConfigError(f"{name} has no parameters: there is nothing to plan.")
    shape = ModelShape(name=name, units=units)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        return _with_transformer(shape, config.to_dict(), type(model).__name__)
    if options.layers is not None and options.hidden is not None:
        note = "activations are those of GPT blocks of this width, without the loss's"
        return replace(
            shape, transformer=_gpt(options.layers, options.hidden), notes=(*shape.notes, note)
        )
    return _without_activations(shape)


def _with_transformer(shape: ModelShape, config: Mapping[str, Any], model_class: str) -> ModelShape:
    """Activations from what nearly all configs of transformers call by the same names."""
    family = families.family_of({**config, "architectures": [model_class]})
    if family is not None:
        return replace(shape, transformer=families.shape_of(family, "", config).transformer)
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    if not all(isinstance(config.get(key), int) for key in sizes):
        return _without_activations(shape)
    hidden, layers, heads, width = (config[key] for key in sizes)
    numbers = Numbers(config)
    kept = saved.rms_norm(hidden) + saved.rms_norm(hidden) + saved.gated_mlp(width)
    kept += saved.attention(hidden, hidden, heads)
    stack = Stack(count=layers, hidden=hidden, widest=width, saved=kept)
    transformer = TransformerShape(
        stacks=(stack,),
        outside=saved.rms_norm(hidden),
        vocabulary=numbers.size("vocab_size", 1) if numbers.has("vocab_size") else 0,
    )
    note = "this family is not known: activations are those of Llama blocks of its width"
    return replace(shape, transformer=transformer, notes=(*shape.notes, note))


def _without_activations(shape: ModelShape) -> ModelShape:
    note = (
        "activations are not counted: nothing here says how wide the model's blocks are. "
        "--layers and --hidden do, for blocks like GPT's"
    )
    return replace(shape, notes=(*shape.notes, note))
