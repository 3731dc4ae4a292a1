"""A module without example inputs: its fx trace, lowered to the ATen calls that an exported program would hold.

Each call of the trace is run on tensors without data, and the ATen calls it makes are recorded. Sizes nobody knows are
unbacked symbols, through which torch's own shape functions see; where they cannot, and where not even the rank is
known, the result is a value without a shape. A 2-D or 3-D convolution or norm says the rank of what it reads: an
unbatched convolution in front of such a norm could not run. A 1-D one does not: a norm over (batch, channels) and one
over (batch, channels, length) are the same module.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .torch_capture import make_functional
from .torch_nodes import UNKNOWN
from .torch_trial import first_line, quiet

aten = torch.ops.aten


class UntraceableError(Exception):
    """The module has no fx trace that says all it does."""


@dataclass(slots=True, eq=False)
class TracedProgram:
    """What `lift` and `Tree` read of an exported program."""

    graph: fx.Graph
    graph_module: Any
    graph_signature: ExportGraphSignature
    state_dict: dict[str, Any]
    constants: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Unknown:
    """A value of the trace of which neither rank nor sizes are known, and the node that makes it."""

    node: fx.Node


def trace(module: nn.Module) -> TracedProgram:
    """Lower the fx trace of a module in eval mode. Raises UntraceableError in one line."""
    try:
        with quiet():
            _check_questions(module)
            tracer = _Tracer()
            traced = fx.GraphModule(module, tracer.trace(module, concrete_args=_defaults(module)))
            fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
            with FakeCopyMode(fake):
                weightless = copy.deepcopy(traced)
            lowering = _Lowering(weightless, fake)
            with fake, torch.no_grad():
                returned = lowering.run()
    except Exception as e:
        raise UntraceableError(first_line(e)) from e
    lowering.lowered.output(tuple(n for n in map(lowering.node_of, pytree.tree_leaves(returned)) if n is not None))
    for node in reversed(lowering.lowered.nodes):
        if node.target is operator.getitem and not node.users:
            lowering.lowered.erase_node(node)
    if not make_functional(lowering.lowered):
        raise UntraceableError("an operation in place writes into a value that others hold")
    signature = ExportGraphSignature(lowering.specs, [])
    named = {**dict(traced.named_parameters()), **dict(traced.named_buffers())}
    state = {s.target: named[s.target] for s in lowering.specs if s.target is not None}
    return TracedProgram(lowering.lowered, weightless, signature, state, {})


class _Proxy(fx.Proxy):
    """A value of the trace.

    `x += y` is the operation in place that it is; fx traces it as `x + y`. What a branch may ask of a tensor without an
    operation, its type above all, has no answer: a wrong one would be a wrong branch.
    """

    def __getattr__(self, name: str) -> Any:
        if name in _UNANSWERED:
            raise UntraceableError(f"the module asks for the {name} of a value")
        if not hasattr(torch.Tensor, name):
            raise AttributeError(f"a tensor has no attribute {name!r}")
        return super().__getattr__(name)


_UNANSWERED = {"device", "dtype", "is_cuda", "is_sparse", "layout", "requires_grad"}


class _Tracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def _check_questions(module: nn.Module) -> None:
    """Raise where Python code asks what kind of thing a value is: of a value of the trace the answer would be wrong."""
    for path, m in module.named_modules():
        if type(m).__module__.startswith("torch.nn."):
            continue
        asked = _names_in(getattr(type(m).forward, "__code__", None)) & _OF_KIND
        if asked:
            raise UntraceableError(f"{path or type(m).__name__} calls {min(asked)}, which depends on the inputs' kind")


def _names_in(code: Any) -> set[str]:
    """Global names and attributes that a function uses, and functions within it."""
    if code is None:
        return set()
    return set(code.co_names).union(*(_names_in(c) for c in code.co_consts if hasattr(c, "co_names")))


_OF_KIND = {"callable", "id", "is_tensor", "isinstance", "issubclass", "type"}


def _defaults(module: nn.Module) -> dict[str, Any]:
    """What a call leaves out: parameters with a default have it, and the trace takes the branches of such a call."""
    parameters = inspect.signature(module.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _in_place(op: Any) -> Callable[[Any, Any], Any]:
    return lambda proxy, other: proxy.tracer.create_proxy("call_function", op, (proxy, other), {})


_AUGMENTED = {getattr(operator, f"i{k}") for k in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod")}
for _op in _AUGMENTED:
    setattr(_Proxy, f"__{_op.__name__}__", _in_place(_op))


class _Lowering(fx.Interpreter):
    """Runs a trace node by node; `lowered` holds the ATen calls that were made."""

    def __init__(self, module: fx.GraphModule, fake: FakeTensorMode):
        super().__init__(module)
        self.lowered, self.specs = fx.Graph(), list[InputSpec]()
        self._fake, self._recorder, self._layers = fake, _Recorder(self.record), _Layers(self)
        self._nodes: dict[int, fx.Node] = {}  # by the identity of the tensor
        self._alive: list[Any] = []  # identities are keys, so the tensors must live as long
        self._assumed: dict[fx.Node, torch.Tensor] = {}
        self._at: fx.Node | None = None
        for name, parameter in module.named_parameters():
            self._put(parameter, self._input(name.replace(".", "_"), InputKind.PARAMETER, name))
        for name, buffer in module.named_buffers():
            self._put(buffer, self._input(name.replace(".", "_"), InputKind.BUFFER, name))

    # ------------------------------------------------------------------ the trace

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An input, or the default of one: the trace is what the module does when the caller leaves it out."""
        assert self._at is not None
        return self._at.args[0] if self._at.args else Unknown(self._input(str(target), InputKind.USER_INPUT, None))

    def run_node(self, n: fx.Node) -> Any:
        """Run a call where all it reads is known."""
        self._at = n
        if not n.op.startswith("call_"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        args, kwargs = pytree.tree_map_only(Unknown, lambda u: self._assumed.get(u.node, u), (args, kwargs))
        if n.op == "call_module":
            args = self._with_rank(self.fetch_attr(str(n.target)), args)
        if not any(isinstance(a, Unknown) for a in pytree.tree_leaves((args, kwargs))):
            known = set(self.lowered.nodes)
            try:
                with self._recorder, self._layers:
                    return getattr(self, n.op)(n.target, args, kwargs)
            except Exception:  # it depends on sizes that nobody knows
                for node in reversed(self.lowered.nodes):
                    if node not in known and node.op != "placeholder":
                        self.lowered.erase_node(node)
        return self._unknown(n, args, kwargs)

    def _with_rank(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The operand of a layer with the shape that the layer asks for, where it asks for one."""
        rank = _RANK.get(type(module), 0)
        if not rank or len(args) != 1 or not isinstance(args[0], Unknown):
            return args
        channels: Any = getattr(module, "in_channels", None) or module.num_features
        dtype = next((p.dtype for p in module.parameters()), torch.get_default_dtype())
        batch, *sizes = (self._free_size() for _ in range(rank - 1))
        value = torch.empty([batch, channels, *sizes], dtype=dtype)
        args[0].node.meta["val"] = value
        self._assumed[args[0].node] = value
        self._put(value, args[0].node)
        return (value,)

    def _free_size(self) -> Any:
        size = self._fake.shape_env.create_unbacked_symint()  # type: ignore[union-attr]
        torch._check(size >= 1)
        return size

    def _unknown(self, n: fx.Node, args: Any, kwargs: Any) -> Unknown:
        """The result of a call that could not be run; norms among them are to be known as such."""
        if n.op == "call_module" and isinstance(module := self.fetch_attr(str(n.target)), _NormBase):
            target = aten.instance_norm.default if isinstance(module, _InstanceNorm) else aten.batch_norm.default
            names = ("weight", "bias", "running_mean", "running_var")
            operands = (*args, *(getattr(module, k) for k in names), False, 0.0, module.eps, False)
            return Unknown(self._call(target, operands, {}))
        if n.op == "call_function" and n.target is nn.functional.batch_norm:
            return Unknown(self._call(aten.batch_norm.default, _batch_norm_operands(*args, **kwargs), {}))
        read = [t for t in pytree.tree_leaves((args, kwargs)) if self.node_of(t) is not None]
        if n.op == "call_module":
            name = type(self.fetch_attr(str(n.target))).__name__
        else:
            name = getattr(n.target, "__name__", str(n.target))
        node = self._call(_stand_in(name), tuple(read), {})
        node.meta[UNKNOWN] = True
        if name.endswith("_") or n.target in _AUGMENTED or kwargs.get("inplace"):
            node.meta["was_in_place"] = True
        return Unknown(node)

    # ------------------------------------------------------------------ the calls

    def node_of(self, value: Any) -> fx.Node | None:
        """The node that makes a value, or None for what is no tensor."""
        return value.node if isinstance(value, Unknown) else self._nodes.get(id(value))

    def record(self, target: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A call that was made, as a node; the tensors of a tuple as nodes of their own."""
        if not any(isinstance(t, torch.Tensor) for t in pytree.tree_leaves(result)):
            return
        node = self._call(target, args, kwargs)
        node.meta["val"] = result
        if isinstance(result, torch.Tensor):
            self._put(result, node)
            return
        for k, item in enumerate(result):
            if isinstance(item, torch.Tensor):
                taken = self._call(operator.getitem, (node, k), {})
                taken.meta["val"] = item
                self._put(item, taken)

    def as_one(self, target: Any, operands: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """A call recorded by a name of its own, not by what torch makes of it."""
        with self._recorder.paused():
            result = run()
        self.record(target, operands, {}, result)
        return result

    def _call(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        assert self._at is not None
        args, kwargs = pytree.tree_map_only((torch.Tensor, Unknown), self._operand, (args, kwargs))
        node = self.lowered.create_node("call_function", target, tuple(args), dict(kwargs), name=_name_of(target))
        node.meta["nn_module_stack"] = dict(self._at.meta.get("nn_module_stack") or {})
        return node

    def _operand(self, value: Any) -> fx.Node:
        """The node of a tensor; one that came from nowhere is as good as an input."""
        node = self.node_of(value)
        if node is None:
            node = self._input("constant", InputKind.USER_INPUT, None)
            node.meta["val"] = value
            self._put(value, node)
        return node

    def _input(self, name: str, kind: InputKind, target: str | None) -> fx.Node:
        last = next((n for n in reversed(self.lowered.nodes) if n.op == "placeholder"), None)
        with self.lowered.inserting_after(last) if last is not None else self.lowered.inserting_before(None):
            node = self.lowered.placeholder(name)
        persistent = True if kind is InputKind.BUFFER else None
        self.specs.append(InputSpec(kind, TensorArgument(node.name), target, persistent))
        return node

    def _put(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._alive.append(tensor)
        node.meta.setdefault("val", tensor)
        self._nodes[id(tensor)] = node  # an operation in place returns its operand: what reads it later reads this


class _Recorder(TorchDispatchMode):
    """Hands on every ATen call that returns."""

    def __init__(self, record: Callable[[Any, Any, Any, Any], None]):
        super().__init__()
        self._record, self._paused = record, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let calls pass unrecorded."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            self._record(func, args, kwargs or {}, result)
        return result


class _Layers(TorchFunctionMode):
    """Layers that torch takes apart before a dispatch mode sees them, and norms, whose shape function asks too much."""

    def __init__(self, lowering: _Lowering):
        super().__init__()
        self._lowering = lowering

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is nn.functional.linear:
            operands, target, run = _linear_operands(*args, **given), aten.linear.default, lambda: func(*args, **given)
        elif func in _OPERANDS:
            operands, target = _OPERANDS[func](*args, **given), _NORM_OF[func]
            run = lambda: torch.empty_like(operands[0])  # noqa: E731
        else:
            return func(*args, **given)
        return self._lowering.as_one(target, operands, run)


def _linear_operands(input: Any, weight: Any, bias: Any = None) -> tuple[Any, ...]:  # noqa: A002
    return input, weight, bias


def _batch_norm_operands(
    input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,  # noqa: A002
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Any, ...]:  # fmt: skip
    return input, weight, bias, running_mean, running_var, training, momentum, eps, False


def _instance_norm_operands(
    input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,  # noqa: A002
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Any, ...]:  # fmt: skip
    return input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, False


def _name_of(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return schema.name.split("::")[1] if schema is not None else getattr(target, "__name__", str(target))


def _stand_in(name: str) -> Callable[..., Any]:
    """A function to name a call by that is not run again."""

    def call(*args: Any) -> Any:
        raise AssertionError("a lowered trace is not run")

    call.__name__ = name
    return call


_OPERANDS: dict[Any, Callable[..., tuple[Any, ...]]] = {
    nn.functional.batch_norm: _batch_norm_operands,
    nn.functional.instance_norm: _instance_norm_operands,
    torch.batch_norm: lambda *args: args,
    torch.instance_norm: lambda *args: args,
}
_NORM_OF = {
    nn.functional.batch_norm: aten.batch_norm.default,
    nn.functional.instance_norm: aten.instance_norm.default,
    torch.batch_norm: aten.batch_norm.default,
    torch.instance_norm: aten.instance_norm.default,
}
_RANK: dict[type, int] = {
    **dict.fromkeys((nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d), 4),
    **dict.fromkeys((nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d), 5),
}
