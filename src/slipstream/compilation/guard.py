"""Compiled callables: the first call of each signature is made alone, none is made uncompiled or recompiled unseen.

``compiled_flex_attention`` is flex attention in that form. The function that is compiled looks for itself whether it is
being traced, so that no way around the compiler can be taken unseen (compilation switched off by an environment
variable or a stance, a recompile limit, a graph break).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from slipstream.compilation import final_shapes
from slipstream.compilation.dense import refuse_eager_flex
from slipstream.compilation.fx_trace import trace_lock
from slipstream.compilation.locks import first_call_lock, new_lock

if TYPE_CHECKING:
    from torch import Tensor

_lock = new_lock()
_flex: list[FirstCallAlone] = []
_KEPT = "_slipstream_signature"
_describe: dict[type, Callable[[Any], Any]] = {}
_mask_numbers: dict[Any, tuple[str, int]] = {}
_numbers = itertools.count()


def signature(value: Any) -> Any:
    """Return what a static compilation of a call depends on, as a hashable value; cheap: it is made at every call.

    Tensors count by shape, strides, dtype, device and whether they want a gradient; containers by their items; block
    masks by shape, tile size, whether they have full tiles, and predicate: its code and what it closes over; other
    objects by their identity, and they are kept.
    """
    kind = type(value)
    describe = _describe.get(kind)
    if describe is None:
        describe = _describe[kind] = _describer(value)
    return describe(value)


def _describer(value: Any) -> Callable[[Any], Any]:
    """Return how values of this type are described; asked once a type, since asking costs more than describing."""
    proxy = getattr(sys.modules.get("torch.fx.proxy"), "Proxy", None)
    if proxy is not None and isinstance(value, proxy):  # has every attribute that it is asked for
        return _Same
    if hasattr(value, "mask_mod"):
        return _mask
    if hasattr(value, "requires_grad") and hasattr(value, "get_device"):
        return _tensor
    if value is None or isinstance(value, bool | int | str) or type(value).__module__ == "torch":
        return lambda v: (type(v), v)  # 1, True and 1.0 are equal, and compiled apart
    if isinstance(value, float):
        return lambda v: (float, repr(v))  # nan is not equal to itself
    if isinstance(value, slice):
        return lambda v: (slice, *map(signature, (v.start, v.stop, v.step)))
    if isinstance(value, tuple | list):
        return lambda v: tuple(map(signature, v))
    if isinstance(value, dict):
        return lambda v: tuple((k, signature(x)) for k, x in v.items())
    return _Same


class _Same:
    """Equal to what holds the same object. Keeps it: an id alone may belong to another object later."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __repr__(self) -> str:
        return object.__repr__(self.value)


def _signatures(*args: Any, **kwargs: Any) -> Any:
    return tuple([signature(a) for a in args]), signature(kwargs) if kwargs else None


def _tensor(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype, value.get_device(), value.requires_grad)


def _mask(mask: Any) -> Any:
    """Return a block mask's part of the signature, kept on the mask: it is refreshed in place, not made anew."""
    own = mask.__dict__
    kept = own.get(_KEPT)
    if kept is None or kept[0] is not own.get("mask_mod"):
        indices = [getattr(mask, name, None) for name in ("kv_indices", "full_kv_indices")]
        tiles = tuple(None if found is None else tuple(found.shape) for found in indices)
        found = (tuple(mask.shape), mask.BLOCK_SIZE, tiles, _closure(mask.mask_mod))
        # A number in its place: the whole of it would be hashed at every call.
        kept = own[_KEPT] = (own.get("mask_mod"), _mask_numbers.setdefault(found, ("mask", next(_numbers))))
    return kept[1]


def _closure(predicate: Any) -> Any:
    """Return what a predicate's compilation depends on: code, and by signature what it closes over."""
    code = getattr(predicate, "__code__", None)
    if code is None:
        return _Same(predicate)
    return (code, *(signature(cell.cell_contents) for cell in predicate.__closure__ or ()))


class FirstCallAlone:
    """A function compiled anew for each static signature, whose first call is made under one lock of the process.

    Thread-safe. Later calls take no lock. Each signature has a compiled object and a code object of its own: no shape
    is checked against the guards of another, and shapes alone never meet torch's recompile limit. The lock is
    not held across a backward pass, and not while another thread's later calls run.
    """

    def __init__(self, function: Callable[..., Any], *, key: Callable[..., Any] | None = None, **options: Any) -> None:
        """Say how to compile.

        ``options`` go to ``torch.compile``; ``fullgraph=True`` and ``dynamic=False`` unless they say otherwise.
        ``key``: what the compilation depends on, given the arguments; else the ``signature`` of each of them.
        """
        self.function = function
        self.name = getattr(function, "__qualname__", repr(function))
        self._options = {"fullgraph": True, "dynamic": False, **options}
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._key = key or _signatures
        # Looked up once: an import statement in every call would cost more than all the rest.
        self._traced: Any = None
        self._modes: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function compiled for these arguments. Inside another compiled region it is traced with that."""
        traced = self._traced or self._load()
        if traced():
            return self.function(*args, **kwargs)
        grad, autocast = self._modes
        key = (self._key(*args, **kwargs), grad(), autocast())
        compiled = self._compiled.get(key)
        if compiled is not None:
            try:
                return compiled(*args, **kwargs)
            except Exception:
                if (refused := final_shapes.take_refusal()) is not None:
                    raise refused from None
                raise
        return self._first(key, args, kwargs)

    def _load(self) -> Any:
        import torch

        self._modes = torch.is_grad_enabled, torch._C._is_any_autocast_enabled
        self._traced = torch.compiler.is_dynamo_compiling
        return self._traced

    def _first(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch

        if trace_lock()._is_owned():
            # This thread is in the middle of a trace. Whoever has the gate may be waiting for the lock that the trace
            # holds; and the compiled call below says itself what is wrong with being traced.
            return torch.compile(_twin(self.function), **self._options)(*args, **kwargs)
        with first_call_lock():
            compiled = self._compiled.get(key)
            if compiled is not None:  # another thread was first
                return compiled(*args, **kwargs)
            final_shapes.meet(self.name, f"meets a new signature, {key[0]},")
            compiled = torch.compile(_twin(self.function), **self._options)
            result = compiled(*args, **kwargs)
            self._compiled[key] = compiled
            return result

    def signatures(self) -> int:
        """Return for how many signatures it has been compiled."""
        return len(self._compiled)

    def forget(self) -> None:
        """Drop every compiled object."""
        self._compiled.clear()


final_shapes.gate(FirstCallAlone.__call__.__code__, FirstCallAlone._first.__code__)


def _twin(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function over a copy of its code: dynamo keeps what it compiled, and its limit, by code object."""
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace()
    twin = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
    return twin


def first_call_alone(function: Callable[..., Any], **options: Any) -> FirstCallAlone:
    """Return ``function`` compiled with ``torch.compile(**options)``, safe to call from many threads at once."""
    return FirstCallAlone(function, **options)


def _attend(query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> Tensor:
    """Call flex attention with grouped heads. Traced: the check below is folded away. Untraced: it raises."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    if not torch.compiler.is_dynamo_compiling():
        refuse_eager_flex(query, key)
    # Below 128 queries the default is another kernel, for decoding; it has no configuration for many of our shapes
    # (96 queries with grouped heads: "no choices exist for backend").
    out: Tensor = flex_attention(  # type: ignore[assignment]
        query, key, value, block_mask=block_mask, enable_gqa=True, kernel_options={"BACKEND": "TRITON"}
    )
    return out


def _attend_key(query: Any, key: Any, value: Any, block_mask: Any) -> Any:
    """Return what ``_attend`` depends on; value is as key is."""
    return (
        query.shape,
        key.shape,
        query.stride(),
        key.stride(),
        query.dtype,
        query.get_device(),
        query.requires_grad,
        key.requires_grad,
        block_mask if block_mask is None else _mask(block_mask),
    )


def compiled_flex_attention() -> FirstCallAlone:
    """Return ``attend(query, key, value, block_mask) -> Tensor``, one object for the process. Thread-safe.

    query [R, heads, Q, d], key and value [R, kv_heads, K, d]; the result has query's shape and dtype. ``fullgraph``
    makes a graph break an error, ``dynamic=False`` one kernel a shape. Inside another compiled region it is inlined.
    """
    with _lock:
        if not _flex:
            _flex.append(FirstCallAlone(_attend, key=_attend_key))
        return _flex[0]
