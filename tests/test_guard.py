"""A released parameter: touching it gathers, some calls are refused, some get past the guard.

Reading freed storage would kill the process, so each call runs in a process of its own: one process
sets up a sharded model after a training step and forks a child for every call. A crash shows as
the child's signal.
"""

from __future__ import annotations

import copy
import inspect
import io
import json
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import get_testing_overrides, resolve_name

import onecopy
from tests import models
from tests.pool import Pool

NAME = "blocks.1.up.weight"  # of the parameter that is touched
SHAPE = (72, 18)
CALL_TIMEOUT = 30  # seconds
CONVERT = "convert the model before shard"


@dataclass
class Subject:
    """What a call is given: a parameter, its model, and plain tensors beside it."""

    model: nn.Module
    p: nn.Parameter
    block: nn.Module
    linear: nn.Linear
    other: Tensor
    x: Tensor


def subject(model: nn.Module) -> Subject:
    """The same parameter of any model "tied"."""
    linear = model.get_submodule(NAME.removesuffix(".weight"))
    block = model.get_submodule("blocks.1")
    assert isinstance(linear, nn.Linear), "the blocks of a GPT have linears"
    return Subject(model, linear.weight, block, linear, torch.ones(SHAPE), torch.ones(2, 18))


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """One backward, and one step with an optimizer."""
    models.loss(model, models.batch("tied", 0, 0)).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


Call = Callable[[Subject], Any]


# What gathers ---------------------------------------------------------------------------------


def _no_grad(function: Callable[[Tensor], Any]) -> Call:
    def call(s: Subject) -> Any:
        with torch.no_grad():
            return function(s.p)

    return call


def _numpy(s: Subject) -> Any:
    import numpy

    return numpy.asarray(s.p)


def _safetensors(s: Subject) -> Any:
    from safetensors.torch import save

    return save({"p": s.p})


def _set_data(s: Subject) -> None:
    s.p.data = s.other


def _set_item(s: Subject) -> None:
    with torch.no_grad():
        s.p[0] = 1.0


def _ema(s: Subject) -> None:
    with torch.no_grad():
        torch.zeros_like(s.p).lerp_(s.p, 0.1)


def _functional_call(s: Subject) -> Any:
    return torch.func.functional_call(s.linear, {"weight": s.p, "bias": s.linear.bias}, (s.x,))


def _checkpoint(s: Subject) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda p: p.sum(), s.p, use_reentrant=False)


def _prune(s: Subject) -> Any:
    from torch.nn.utils import prune

    return prune.l1_unstructured(s.linear, "weight", 0.5)


class _Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def _parametrize(s: Subject) -> Any:
    return nn.utils.parametrize.register_parametrization(s.linear, "weight", _Double())


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor) -> Tensor:
        return p * 2


def _fill_aliases(s: Subject) -> None:
    """Tensors taken from several units before any of them is written to."""
    for alias in [p.data for p in s.model.parameters()]:
        alias.fill_(0.5)


def _read_then_use_together(s: Subject) -> Tensor:
    """The first unit is gathered, and not guarded, when the second is touched."""
    other = s.model.get_parameter("blocks.0.up.weight")
    return torch.stack([other.norm(), s.p.norm()]) + torch.stack([other, s.p]).norm()


TOUCHES: dict[str, Call] = {
    "add": lambda s: s.p + 1,
    "add on the right": lambda s: 1 + s.p,
    "add to a tensor": lambda s: s.other + s.p,
    "multiply in place": _no_grad(lambda p: p.mul_(2)),
    "multiply augmented": _no_grad(lambda p: p.__imul__(2)),
    "negate": lambda s: -s.p,
    "power": lambda s: s.p**2,
    "compare": lambda s: s.p == s.other,
    "less": lambda s: s.p < 0,
    "matmul": lambda s: s.x @ s.p.t(),
    "matmul function": lambda s: torch.matmul(s.p, s.x.t()),
    "einsum": lambda s: torch.einsum("oi,bi->bo", s.p, s.x),
    "foreach add": lambda s: torch._foreach_add([s.p, s.p], 1.0),
    "foreach mul in place": _no_grad(lambda p: torch._foreach_mul_([p], 0.5)),
    "foreach norm": lambda s: torch._foreach_norm([s.p]),
    "foreach copy from": lambda s: torch._foreach_copy_([s.other], [s.p]),
    "data_ptr": lambda s: s.p.data_ptr(),
    "numpy": lambda s: s.p.numpy(),
    "numpy of detached": lambda s: s.p.detach().numpy(),
    "numpy array": lambda s: s.p.__array__(),
    "numpy asarray": _numpy,
    "dlpack method": lambda s: s.p.__dlpack__(),
    "tolist": lambda s: s.p.tolist(),
    "item": lambda s: s.p[0, 0].item(),
    "float": lambda s: float(s.p),
    "bool": lambda s: bool(s.p),
    "iterate": lambda s: list(s.p),
    "contains": lambda s: 1.0 in s.p,
    "format": lambda s: f"{s.p:.3f}",
    "copy_ into": _no_grad(lambda p: p.copy_(torch.ones(SHAPE))),
    "copy_ from": lambda s: s.other.copy_(s.p),
    "fill_": _no_grad(lambda p: p.fill_(0)),
    "zero_": _no_grad(lambda p: p.zero_()),
    "normal_": _no_grad(lambda p: p.normal_()),
    "set item": _set_item,
    "data": lambda s: s.p.data,
    "data fill": lambda s: s.p.data.fill_(0),
    "set data": _set_data,
    "detach": lambda s: s.p.detach(),
    "detach_": lambda s: s.p.detach_(),
    "clone": lambda s: s.p.clone(),
    "contiguous": lambda s: s.p.contiguous(),
    "new_tensor": lambda s: s.p.new_tensor(s.p),
    "aten sum": lambda s: torch.ops.aten.sum(s.p),
    "aten mul": lambda s: torch.ops.aten.mul.Tensor(s.p, s.other),
    "aten detach": lambda s: torch.ops.aten.detach.default(s.p),
    "aten copy_": lambda s: torch.ops.aten.copy_.default(s.other, s.p),
    "functional_call": _functional_call,
    "deepcopy": lambda s: copy.deepcopy(s.p),
    "copy": lambda s: copy.copy(s.p),
    "pickle": lambda s: pickle.dumps(s.p),
    "torch.save": lambda s: torch.save(s.p, io.BytesIO()),
    "safetensors": _safetensors,
    "to dtype": lambda s: s.p.to(torch.float64),
    "to meta": lambda s: s.p.to("meta"),
    "half": lambda s: s.p.half(),
    "type": lambda s: s.p.type(torch.float64),
    "cpu": lambda s: s.p.cpu(),
    "pin_memory": lambda s: s.p.pin_memory(),
    "untyped_storage": lambda s: s.p.untyped_storage(),
    "storage": lambda s: s.p.storage(),
    "view": lambda s: s.p.view(-1),
    "view as dtype": lambda s: s.p.view(torch.int32),
    "reshape": lambda s: s.p.reshape(-1),
    "flatten": lambda s: s.p.flatten(),
    "t": lambda s: s.p.t(),
    "T": lambda s: s.p.T,
    "mT": lambda s: s.p.mT,
    "transpose": lambda s: s.p.transpose(0, 1),
    "as_strided": lambda s: s.p.as_strided((2,), (1,)),
    "index": lambda s: s.p[0],
    "slice": lambda s: s.p[:2, 1:3],
    "chunk": lambda s: s.p.chunk(2),
    "unbind": lambda s: s.p.unbind(),
    "expand": lambda s: s.p.expand(2, *SHAPE),
    "narrow": lambda s: torch.narrow(s.p, 0, 0, 1),
    "view_as": lambda s: s.p.view_as(s.other),
    "linear": lambda s: F.linear(s.x, s.p),
    "embedding": lambda s: F.embedding(torch.tensor([1]), s.p),
    "layer norm": lambda s: F.layer_norm(s.other, SHAPE, s.p),
    "call a module": lambda s: s.linear(s.x),
    "init normal": lambda s: nn.init.normal_(s.p),
    "init xavier": lambda s: nn.init.xavier_uniform_(s.p),
    "init zeros": lambda s: nn.init.zeros_(s.p),
    "init trunc normal": lambda s: nn.init.trunc_normal_(s.p),
    "init orthogonal": lambda s: nn.init.orthogonal_(s.p),
    "reset_parameters": lambda s: s.linear.reset_parameters(),
    "equal": lambda s: torch.equal(s.p, s.other),
    "allclose": lambda s: torch.allclose(s.p, s.other),
    "norm": lambda s: s.p.norm(),
    "vector_norm": lambda s: torch.linalg.vector_norm(s.p),
    "isnan": lambda s: torch.isnan(s.p).any(),
    "isfinite": lambda s: s.p.isfinite().all(),
    "sum": lambda s: s.p.sum(),
    "mean": lambda s: s.p.mean(),
    "max": lambda s: s.p.max(),
    "max with an axis": lambda s: torch.max(s.p, 0),
    "topk": lambda s: s.p.topk(1),
    "histogram": lambda s: torch.histc(s.p),
    "count_nonzero": lambda s: torch.count_nonzero(s.p),
    "stack": lambda s: torch.stack([s.p, s.p]),
    "cat": lambda s: torch.cat([s.p.new_zeros(1, 18), s.p]),
    "out": lambda s: torch.add(s.other, 1, out=s.p),
    "where": lambda s: torch.where(s.other > 0, s.p, s.other),
    "vector_to_parameters": lambda s: nn.utils.vector_to_parameters(torch.ones(72 * 18), [s.p]),
    "averages (EMA)": _ema,
    "weight_norm": lambda s: nn.utils.parametrizations.weight_norm(s.linear),
    "backward": lambda s: s.p.backward(s.other),
    "autograd.grad": lambda s: torch.autograd.grad(s.p.sum(), s.p),
    "map_": lambda s: s.p.map_(s.other, lambda a, b: a),
    "resize_": _no_grad(lambda p: p.resize_(2)),
    "state_dict of a part": lambda s: s.linear.state_dict(),
    "get_parameter": lambda s: s.model.get_parameter(NAME).sum(),
    "fx": lambda s: torch.fx.symbolic_trace(s.linear)(s.x),
    "from_dlpack": lambda s: torch.from_dlpack(s.p),
    "checkpoint": _checkpoint,
    "autograd.Function": lambda s: _Twice.apply(s.p),
    "parametrize": _parametrize,
    "prune": _prune,
    "export": lambda s: torch.export.export(s.linear, (s.x,)),
    "quantize": lambda s: torch.quantize_per_tensor(s.p, 0.1, 0, torch.qint8),
    "to_sparse": lambda s: s.p.to_sparse(),
    "shared memory of processes": lambda s: torch.multiprocessing.reductions.reduce_tensor(s.p),
    "inference mode": lambda s: torch.inference_mode()(lambda: s.p.sum())(),
    "load_state_dict of a part": lambda s: s.linear.load_state_dict(
        {"weight": torch.ones(SHAPE), "bias": torch.ones(72)}
    ),
    "assert_close": lambda s: torch.testing.assert_close(s.p, s.p),
    "compiled function": lambda s: torch.compile(lambda p: p.sum(), backend="eager")(s.p),
    "a loss on weights": lambda s: sum((p**2).sum() for p in s.model.parameters()),
    "parameters_to_vector": lambda s: nn.utils.parameters_to_vector(s.model.parameters()),
    "apply init": lambda s: s.model.apply(init_linear),
    "aliases of all": _fill_aliases,
    "foreach over all": lambda s: torch._foreach_norm(list(s.model.parameters())),
    "read, then use together": _read_then_use_together,
}

# These raise errors of their own, with a remedy.
REFUSED: dict[str, tuple[Call, str]] = {
    "deepcopy of a part": (lambda s: copy.deepcopy(s.block), "copy the whole model"),
    "pickle of a part": (lambda s: pickle.dumps(s.linear), "model.state_dict()"),
    "pickle of the model": (lambda s: pickle.dumps(s.model), "model.state_dict()"),
    "torch.save of the model": (lambda s: torch.save(s.model, io.BytesIO()), "model.state_dict()"),
    "model.to dtype": (lambda s: s.model.to(torch.float64), "before shard"),
    "part.to dtype": (lambda s: _then_train(s, s.block.to(torch.bfloat16)), CONVERT),
    "model.half": (lambda s: s.model.half(), "before shard"),
    "model.to device": (lambda s: s.model.to("meta"), "before shard"),
    "share_memory_": (lambda s: s.p.share_memory_(), "share copies"),
    "model.share_memory": (lambda s: s.model.share_memory(), "before shard"),
    "load_state_dict(assign=True)": (
        lambda s: s.model.load_state_dict(s.model.state_dict(), assign=True),
        "load with assign=False",
    ),
    "SGD on it": (lambda s: _strange_step(s, foreach=False), "was never attached"),
    "SGD foreach on it": (lambda s: _strange_step(s, foreach=True), "was never attached"),
    "SGD fused on it": (lambda s: _strange_step(s, fused=True), "was never attached"),
}


def init_linear(module: nn.Module) -> None:
    """The usual custom initialisation."""
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)


def _then_train(s: Subject, _: object) -> None:
    train(s.model)


def _strange_step(s: Subject, **options: bool) -> None:
    optimizer = torch.optim.SGD([s.p], lr=0.1, **options)
    s.p.grad = s.other
    optimizer.step()


# What works -----------------------------------------------------------------------------------


def _tag(p: Tensor) -> Any:
    p.tag = "mine"  # type: ignore[attr-defined]
    return p.tag  # type: ignore[attr-defined]


def _freeze_and_back(s: Subject) -> Any:
    s.model.requires_grad_(False)
    frozen = [p.requires_grad for p in s.model.parameters()]
    s.model.requires_grad_(True)
    return frozen, s.p.requires_grad


def _decay_groups(s: Subject) -> Any:
    """What training scripts do to keep norms and biases from decay."""
    return [name for name, p in s.model.named_parameters() if p.ndim >= 2 and p.requires_grad]


def _kept_gradient(s: Subject) -> Any:
    s.p.grad = s.other
    value = s.p.grad
    s.p.grad = None
    return value


# Each gives the same on a released parameter as on one of the plain model.
WORKS: dict[str, Call] = {
    "shape": lambda s: s.p.shape,
    "size": lambda s: (s.p.size(), s.p.size(0), s.p.size(-1)),
    "numel": lambda s: (s.p.numel(), s.p.nelement(), torch.numel(s.p)),
    "len": lambda s: len(s.p),
    "dim": lambda s: (s.p.dim(), s.p.ndim, s.p.ndimension()),
    "dtype": lambda s: (s.p.dtype, s.p.is_floating_point(), torch.is_complex(s.p)),
    "device": lambda s: (s.p.device, s.p.is_cuda, s.p.is_meta, s.p.get_device()),
    "layout": lambda s: (s.p.layout, s.p.is_sparse, s.p.stride(), s.p.is_contiguous()),
    "bytes": lambda s: (s.p.nbytes, s.p.itemsize, s.p.element_size()),
    "type": lambda s: s.p.type(),
    "dir": lambda s: "shape" in dir(s.p),
    "requires_grad": lambda s: (s.p.requires_grad, s.p.is_leaf, s.p.grad_fn, s.p.retains_grad),
    "no grad": lambda s: (s.model.zero_grad(), s.p.grad is None),
    "grad": _kept_gradient,
    "count": lambda s: sum(p.numel() for p in s.model.parameters()),
    "count bytes": lambda s: sum(p.numel() * p.element_size() for p in s.model.parameters()),
    "names": lambda s: [(name, p.shape) for name, p in s.model.named_parameters()],
    "repr of the model": lambda s: repr(s.model),
    "zeros_like": lambda s: torch.zeros_like(s.p),
    "ones_like": lambda s: torch.ones_like(s.p, dtype=torch.float64),
    "full_like": lambda s: torch.full_like(s.p, 3.0),
    "empty_like": lambda s: torch.empty_like(s.p).shape,
    "randn_like": lambda s: torch.randn_like(s.p, requires_grad=True).requires_grad,
    "new_zeros": lambda s: s.p.new_zeros(3),
    "new_full": lambda s: s.p.new_full((2,), 7.0),
    "result_type": lambda s: torch.result_type(s.p, s.x.double()),
    "same size": lambda s: torch.is_same_size(s.p, s.other),
    "hash": lambda s: hash(s.p) == id(s.p),
    "in a set": lambda s: s.p in {s.p},
    "in a dict": lambda s: {s.p: 1}[s.p],
    "in a list": lambda s: s.p in [s.p],
    "is a parameter": lambda s: (isinstance(s.p, nn.Parameter), torch.is_tensor(s.p)),
    "same object": lambda s: s.model.get_parameter(NAME) is s.p is s.linear.weight,
    "tied": lambda s: s.model.head.weight is s.model.tokens.weight,
    "attribute": lambda s: _tag(s.p),
    "requires_grad_": _freeze_and_back,
    "decay groups": _decay_groups,
    "hooks": lambda s: s.p.register_hook(lambda gradient: gradient).remove(),
    "zero_grad": lambda s: s.model.zero_grad(),
    "train and eval": lambda s: s.model.eval().train().training,
    "forward": lambda s: s.model(torch.tensor([[1, 2, 3]])),
    "functional_call": lambda s: torch.func.functional_call(
        s.model, dict(s.model.named_parameters()), (torch.tensor([[1, 2, 3]]),)
    ),
    "state_dict": lambda s: s.model.state_dict(),
    "state_dict with prefix": lambda s: list(s.model.state_dict(prefix="wrapped.")),
    "state_dict(keep_vars=True)": lambda s: s.model.state_dict(keep_vars=True)[NAME] is s.p,
    "save and load": lambda s: _through_a_file(s.model.state_dict()),
    "load_state_dict": lambda s: s.model.load_state_dict(s.model.state_dict()).missing_keys,
}


def _through_a_file(state: dict[str, Tensor]) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(state, file)
    assert len(file.getvalue()) < 4 * 4 * sum(value.numel() for value in state.values())
    file.seek(0)
    loaded: dict[str, Tensor] = torch.load(file)
    return loaded


def check_works(s: Subject, name: str) -> None:
    """The call on the released parameter against that on a plain model's."""
    plain = subject(models.build("tied"))
    ours, theirs = WORKS[name](s), WORKS[name](plain)
    assert _is_same(ours, theirs), f"{ours!r} != {theirs!r}"


def check_touch(s: Subject, name: str) -> None:
    """The call against that on a plain model: the same result, error, and effect on the model."""
    plain = subject(models.build("tied"))
    plain.model.load_state_dict(s.model.state_dict())
    ours, theirs = _result(TOUCHES[name], s), _result(TOUCHES[name], plain)
    if name not in ("data_ptr", "shared memory of processes"):
        assert _is_same(ours, theirs), f"{ours!r} != {theirs!r}"
    values, others = s.model.state_dict(), plain.model.state_dict()
    assert list(values) == list(others)
    for path, value in values.items():
        assert torch.equal(value, others[path]), path


def _result(call: Call, s: Subject) -> Any:
    torch.manual_seed(0)
    try:
        return call(s)
    except Exception as error:
        return (type(error).__name__, str(error))


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        if left.is_meta or left.is_quantized or left.is_sparse:
            return str(left) == str(right)
        return torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and _is_same([*left.values()], [*right.values()])
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_is_same, left, right))
    if isinstance(left, str | bool | int | float | torch.dtype | torch.device | torch.Size):
        return left == right
    return type(left).__name__ == type(right).__name__


# What gets past the guard ---------------------------------------------------------------------


def _without_function_modes(s: Subject) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return s.p.sum()


def _kept_in_forward(copied: bool) -> Call:
    def call(s: Subject) -> Any:
        kept: list[Tensor] = []

        def keep(module: nn.Linear, *_: Any) -> None:
            kept.append(module.weight.detach().clone() if copied else module.weight.detach())

        s.linear.register_forward_hook(keep)
        train(s.model)
        return kept[0].sum()

    return call


def _inside(function: Callable[[Tensor], Any]) -> Call:
    """The remedy of most: the same call where everything is gathered."""

    def call(s: Subject) -> Any:
        with onecopy.full_parameters(s.model):
            return function(s.p.detach().clone())

    return call


def _replaced_memory(s: Subject) -> Any:
    with torch.no_grad():
        return s.p.set_(s.other)


def _copied_values(s: Subject) -> Any:
    with onecopy.full_parameters(s.model), torch.no_grad():
        return s.p.copy_(s.other)


def _sum_of_capsule(p: Tensor) -> Any:
    return torch.from_dlpack(torch._C._to_dlpack(p)).sum()


def _row_sums(p: Tensor) -> Any:
    return torch.vmap(lambda row: row.sum())(p)


def _square_gradient(p: Tensor) -> Any:
    return torch.func.grad(lambda q: (q**2).sum())(p)


def _square_jacobian(p: Tensor) -> Any:
    return torch.func.jacrev(lambda q: (q**2).sum())(p)


# Name: the call that the guard does not see, and its remedy. They are in docs/parameters.md too.
BYPASSES: dict[str, tuple[Call, Call]] = {
    "torch.tensor": (lambda s: torch.tensor(s.p), _inside(lambda p: p)),
    "as_subclass": (
        lambda s: s.p.as_subclass(Tensor).sum(),
        _inside(lambda p: p.as_subclass(Tensor).sum()),
    ),
    "DisableTorchFunctionSubclass": (_without_function_modes, _inside(lambda p: p.sum())),
    "to_dlpack": (lambda s: _sum_of_capsule(s.p), _inside(_sum_of_capsule)),
    "torch.func.vmap": (lambda s: _row_sums(s.p), _inside(_row_sums)),
    "torch.func.grad": (lambda s: _square_gradient(s.p), _inside(_square_gradient)),
    "torch.func.jacrev": (lambda s: _square_jacobian(s.p), _inside(_square_jacobian)),
    "alias kept from forward": (_kept_in_forward(False), _kept_in_forward(True)),
    "set_": (_replaced_memory, _copied_values),
    "swap_tensors": (
        lambda s: torch.utils.swap_tensors(s.p, nn.Parameter(s.other)),
        _copied_values,
    ),
}


# Running them ---------------------------------------------------------------------------------

Outcome = dict[str, Any]


def _attempt(call: Callable[[], Any]) -> Outcome:
    try:
        call()
    except BaseException as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": None, "message": ""}


def _in_children(
    calls: Sequence[tuple[str, Callable[[], Any]]], *, share: bool
) -> Iterator[tuple[str, Outcome]]:
    """Run each call in a forked child; with `share` a child goes on until a call crashes."""
    position = 0
    while position < len(calls):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            with os.fdopen(writing, "w", buffering=1) as pipe:
                for name, call in calls[position:]:
                    pipe.write(f"{name}\n")
                    signal.alarm(CALL_TIMEOUT)  # a call that hangs is named, too
                    outcome = _attempt(call)
                    pipe.write(json.dumps(outcome) + "\n")
                    if not share:
                        break
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            lines = pipe.read().splitlines()
        _, status = os.waitpid(child, 0)
        for name, text in zip(lines[::2], lines[1::2], strict=False):
            yield name, json.loads(text)
        if len(lines) % 2:
            yield lines[-1], {"error": signal.Signals(os.WTERMSIG(status)).name, "message": ""}
        position += (len(lines) + 1) // 2


def _everything_overridable(s: Subject) -> list[tuple[str, Callable[[], Any]]]:
    """Every function of torch that `__torch_function__` sees, called with the parameter."""
    calls = []
    for function, dummy in get_testing_overrides().items():
        if str(getattr(function, "__module__", "")).startswith("torch.distributed"):
            # A forked child has no threads that would carry out a collective.
            continue
        required = [
            one
            for one in inspect.signature(dummy).parameters.values()
            if one.default is one.empty
            and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]

        def call(function: Any = function, number: int = max(1, len(required))) -> Any:
            try:
                return function(*[s.p] * number)
            except TypeError:
                return function([s.p, s.p])

        calls.append((str(resolve_name(function) or function), call))
    return calls


def main() -> None:
    """Run every call on a fresh copy of one process; print the outcomes as JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = models.build("tied")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    onecopy.shard(model, optimizer, stage=3)
    train(model, optimizer)
    s = subject(model)
    groups: dict[str, list[tuple[str, Callable[[], Any]]]] = {
        "touches": [(name, lambda name=name: check_touch(s, name)) for name in TOUCHES],
        "refused": [(name, lambda call=call: call(s)) for name, (call, _) in REFUSED.items()],
        "works": [(name, lambda name=name: check_works(s, name)) for name in WORKS],
        "bypasses": [(name, lambda call=call: call(s)) for name, (call, _) in BYPASSES.items()],
        "remedies": [(name, lambda call=call: call(s)) for name, (_, call) in BYPASSES.items()],
        "overridable": _everything_overridable(s),
    }
    results = {}
    with open(os.devnull, "w") as nowhere:
        sys.stdout, own = nowhere, sys.stdout
        os.dup2(nowhere.fileno(), 2)
        for group, calls in groups.items():
            # Only the sweep, which looks for nothing but crashes, is long enough to share children.
            results[group] = dict(_in_children(calls, share=group == "overridable"))
        sys.stdout = own
    json.dump(results, sys.stdout)


@pytest.fixture(scope="module")
def outcomes(pool: Pool) -> dict[str, dict[str, Outcome]]:
    """What became of every call."""
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    done = pool.run_in_subprocess("from tests.test_guard import main; main()", timeout=240)
    assert done.returncode == 0, done.stderr
    results: dict[str, dict[str, Outcome]] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize("name", TOUCHES)
def test_touching_gathers(outcomes: dict[str, dict[str, Outcome]], name: str) -> None:
    """Every way to use a parameter does what it does on the plain model."""
    assert outcomes["touches"][name] == {"error": None, "message": ""}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(outcomes: dict[str, dict[str, Outcome]], name: str) -> None:
    outcome = outcomes["refused"][name]
    assert outcome["error"] == "ShardingError", outcome
    assert REFUSED[name][1] in outcome["message"]


@pytest.mark.parametrize("name", WORKS)
def test_metadata_works_as_on_the_plain_model(
    outcomes: dict[str, dict[str, Outcome]], name: str
) -> None:
    assert outcomes["works"][name] == {"error": None, "message": ""}


def test_nothing_that_the_guard_sees_crashes(outcomes: dict[str, dict[str, Outcome]]) -> None:
    """All functions of torch with overrides: none reads freed memory."""
    found = outcomes["overridable"]
    assert len(found) > 1000
    crashed = [name for name, outcome in found.items() if str(outcome["error"]).startswith("SIG")]
    assert not crashed


@pytest.mark.parametrize("name", BYPASSES)
def test_bypasses_are_as_documented(outcomes: dict[str, dict[str, Outcome]], name: str) -> None:
    """The guard does not see these. Should one be seen, take it from the list in docs."""
    error = outcomes["bypasses"][name]["error"]
    # What is trained has a gradient that knows it, and torch swaps nothing that others refer to.
    expected = {"set_": None, "swap_tensors": "RuntimeError"}
    assert error == expected.get(name, "SIGSEGV")
    assert outcomes["remedies"][name] == {"error": None, "message": ""}


# Without a crash, so in the ranks -------------------------------------------------------------


def looks_of_a_parameter() -> list[str]:
    """The type and repr of a parameter over a unit's life, and a kept copy's values."""
    model = models.build("tied")
    onecopy.shard(model, stage=3)
    p = model.get_parameter(NAME)
    seen = [type(p).__name__, repr(p)]
    with onecopy.full_parameters(model):
        seen += [type(p).__name__, str(type(p) is nn.Parameter), str(p.detach().shape)]
    return [*seen, type(p).__name__]


def test_a_released_parameter_says_what_it_is(pool: Pool) -> None:
    """`type(p) is nn.Parameter` is False while released; repr shows no values, and says so."""
    (seen,) = pool.run(1, looks_of_a_parameter)
    released = "ReleasedParameter"
    assert seen[0] == seen[5] == released
    assert f"{released}(shape={SHAPE}, dtype=torch.float32, device=cpu" in seen[1]
    assert seen[2:5] == ["Parameter", "True", f"torch.Size({list(SHAPE)})"]


def keep_alias(kind: str) -> list[float]:
    """Use an alias after its unit is released, after a step, and see that its unit goes on."""
    model = models.build("tied")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=3)
    p = model.get_parameter(NAME)
    with onecopy.full_parameters(model):
        take: dict[str, Callable[[], Any]] = {
            "detach": lambda: p.detach(),
            "data": lambda: p.data,
            "view": lambda: p.view(-1),
            "numpy": lambda: p.detach().numpy(),
            "state": lambda: model.state_dict(keep_vars=False)[NAME],
        }
        alias = take[kind]()
        before = p.sum().item()
    seen = [before, alias.sum().item()]
    train(model, optimizer)
    seen.append(alias.sum().item())
    del alias
    train(model, optimizer)
    unit, _ = onecopy.handle.of(model).engine.find(p)
    return [*seen, float(unit.flat.untyped_storage().nbytes())]


@pytest.mark.parametrize("kind", ["detach", "data", "view", "numpy", "state"])
def test_aliases_kept_from_full_parameters(pool: Pool, kind: str) -> None:
    """Their bytes stay for as long as they live, and a warning says so once; state dicts copy."""
    ((before, after, later, num_bytes),) = pool.run(1, keep_alias, kind, record_warnings=True)
    texts = [one.message for one in pool.warnings[0]]
    if kind == "state":
        assert texts == []
        assert before == after == later
    else:
        (text,) = texts
        assert "still shares memory with parameters of unit blocks.1" in text
        assert "p.detach().clone()" in text
        assert before == pytest.approx(after)
        assert abs(later - before) < 1.0, "the values of this or of the last gather"
    if kind != "numpy":  # lent to numpy once, a storage can never again be resized
        assert num_bytes == 0, "without aliases the unit is released again"


def let_go_late() -> int:
    """Something holds a unit's values when it is released, and lets go while it is looked at."""
    model = models.build("tied")
    onecopy.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    p, held, looks = model.get_parameter(NAME), [], []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 50:
            held.clear()

    with mock.patch("onecopy.core.unit.time.sleep", sleep), onecopy.full_parameters(model):
        held.append(p.detach())
    unit, _ = onecopy.handle.of(model).engine.find(p)
    return unit.flat.untyped_storage().nbytes()


def test_a_transfer_may_let_go_late(pool: Pool) -> None:
    """Threads of a backend hold a tensor until they run again, on a busy machine: no alias."""
    assert pool.run(1, let_go_late) == [0]


def replace_parameter(how: str) -> None:
    """Put another parameter in the place of one, train."""
    model = models.build("tied")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=3)
    linear = subject(model).linear
    if how == "assign":
        linear.weight = nn.Parameter(torch.ones(SHAPE))
    else:
        new = {"weight": torch.ones(SHAPE), "bias": torch.ones(72)}
        linear.load_state_dict(new, assign=True)
    train(model, optimizer)


@pytest.mark.parametrize("how", ["assign", "load"])
def test_replaced_parameters_are_refused_at_the_step(pool: Pool, how: str) -> None:
    """They would silently be neither trained nor saved."""
    (error,) = pool.run(1, replace_parameter, how, expect_failures=True)
    assert error.type_name == "ShardingError", str(error)
    words = f"parameter {NAME} was replaced" if how == "assign" else "load with assign=False"
    assert words in error.message
