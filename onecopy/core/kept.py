"""Modules that stay in fp32 under a lower compute dtype: which they are, and how they are met.

Around a module that the user keeps, floating-point inputs become fp32 and outputs the compute
dtype again, so that its neighbours need not know. The lists that Hugging Face models carry name
parameters whose module is written to cope with them: those are kept in fp32 and nothing is cast.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from onecopy.core.precision import DTYPES, cast_floating
from onecopy.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from onecopy.policies import Precision

__all__ = ["add_casts", "kept_parameters"]

UNCALLED = (nn.ModuleList, nn.ModuleDict)
# What transformers keeps when it loads a model in a lower dtype. The first list protects bf16
# models that are loaded in fp16, the strict one holds for both.
HUGGING_FACE_LISTS = {
    "fp16": ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    "bf16": ("_keep_in_fp32_modules_strict",),
}


def kept_parameters(root: nn.Module, precision: Precision) -> frozenset[int]:
    """The ids of the parameters that stay in fp32.

    Raises:
        ConfigError: a name in keep_fp32 matches no module, or a kept module shares a parameter
            with one that is not kept.
    """
    if precision.compute not in HUGGING_FACE_LISTS:
        return frozenset()
    _check_names(root, precision)
    kept = [module for top in _kept_tops(root, precision) for module in top.modules()]
    ids = {id(parameter) for module in kept for parameter in module._parameters.values()}
    listed = set(_listed_by_hugging_face(root, precision.compute))
    inside = {id(module) for module in kept}
    for name, module in root.named_modules():
        for key, parameter in module._parameters.items():
            if id(module) in inside or id(parameter) not in ids or id(parameter) in listed:
                continue
            if parameter is not None:
                raise ConfigError(
                    f"keep_fp32 keeps a module whose parameter is also {name}.{key} of a module "
                    f"that computes in {precision.compute}: keep both or neither"
                )
    return frozenset(ids | listed)


def add_casts(root: nn.Module, precision: Precision) -> list[RemovableHandle]:
    """Hooks that cast around the modules that the user keeps."""
    if precision.compute not in HUGGING_FACE_LISTS:
        return []
    compute = DTYPES[precision.compute]
    handles: list[RemovableHandle] = []
    for module in _called(_kept_tops(root, precision)):
        # torch's batch norms take inputs of a lower dtype, and save them as such for backward.
        if not isinstance(module, _BatchNorm):
            handles.append(module.register_forward_pre_hook(_raise_inputs, with_kwargs=True))
            handles.append(module.register_forward_hook(partial(_lower_outputs, compute)))
    return handles


def _raise_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)


def _lower_outputs(compute: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return cast_floating(output, compute)


def _kept_tops(root: nn.Module, precision: Precision) -> Iterator[nn.Module]:
    """The modules that a name in keep_fp32 matches, and batch norms; none inside another."""
    inside: set[int] = set()
    for name, module in root.named_modules():
        if id(module) in inside:
            continue
        is_named = any(_matches(pattern, name, module) for pattern in precision.keep_fp32)
        if is_named or _has_fp32_statistics(module):
            inside.update(id(one) for one in module.modules())
            yield module


def _has_fp32_statistics(module: nn.Module) -> bool:
    """A norm that cannot compute in a lower dtype than its running statistics have."""
    mean = module.running_mean if isinstance(module, _NormBase) else None
    return mean is not None and mean.dtype is torch.float32


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    names = [name, *(kind.__name__ for kind in type(module).__mro__[:-2])]
    return any(fnmatch.fnmatchcase(one, pattern) for one in names)


def _called(modules: Iterator[nn.Module]) -> Iterator[nn.Module]:
    """Containers are never called themselves: their children are."""
    for module in modules:
        if isinstance(module, UNCALLED):
            yield from _called(module.children())
        else:
            yield module


def _check_names(root: nn.Module, precision: Precision) -> None:
    for pattern in precision.keep_fp32:
        modules = list(root.named_modules())
        if any(_matches(pattern, *one) for one in modules):
            continue
        known = {type(module).__name__ for _, module in modules} | {name for name, _ in modules}
        near = difflib.get_close_matches(pattern, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"keep_fp32={pattern!r} matches no module, by class or by name.{hint} The classes "
            f"are {', '.join(sorted({type(module).__name__ for _, module in modules}))}"
        )


def _listed_by_hugging_face(root: nn.Module, compute: str) -> Iterator[int]:
    """Ids of the parameters whose names the lists of a Hugging Face model match.

    As `PreTrainedModel.from_pretrained` does (transformers 5): each entry is searched for anywhere
    in the parameter's name, as a regular expression in which `*` stands for any characters.
    """
    for model in root.modules():
        for attribute in HUGGING_FACE_LISTS[compute]:
            entries = getattr(model, attribute, None) or ()
            patterns = [re.compile(entry.replace("*", ".*")) for entry in entries]
            for name, parameter in model.named_parameters(remove_duplicate=False):
                if any(pattern.search(name) for pattern in patterns):
                    yield id(parameter)
