"""Compiled callables: the first call of each signature is made alone, none is made uncompiled or recompiled unseen.

``compiled_flex_attention`` is flex attention in that form. The function that is compiled looks for itself whether it is
being traced, so that no way around the compiler can be taken unseen (compilation switched off by an environment
variable or a stance, a recompile limit, a graph break).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from slipstream.compilation.dense import refuse_eager_flex
from slipstream.compilation.locks import first_call_lock, new_lock
from slipstream.errors import CompilationError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("slipstream.compilation")
_lock = new_lock()
_flex: list[FirstCallAlone] = []
_final: bool | None = None  # None: shapes may still be new; else whether a new one is an error
_late: dict[str, int] = {}
_KEPT = "_slipstream_signature"
_describe: dict[type, Callable[[Any], Any]] = {}
_mask_numbers: dict[Any, tuple[str, int]] = {}
_numbers = itertools.count()


def shapes_are_final(*, strict: bool) -> None:
    """Say that every shape has been seen: from now on a new signature is an error (``strict``) or counted and logged.

    For the whole process. A run says so after its first step. Thread-safe.
    """
    global _final
    _final = strict


def shapes_may_change() -> None:
    """Take ``shapes_are_final`` back and forget the counts. Thread-safe."""
    global _final
    _final = None
    _late.clear()


def late_compilations() -> dict[str, int]:
    """Return how often each function was compiled for a new signature after ``shapes_are_final``."""
    return dict(_late)


def signature(value: Any) -> Any:
    """Return what a static compilation of a call depends on, as a hashable value; cheap: it is made at every call.

    Tensors count by shape, strides, dtype, device and whether they want a gradient; containers by their items; block
    masks by shape, tile size, and predicate: its code and what it closes over; other objects by their identity.
    """
    kind = type(value)
    describe = _describe.get(kind)
    if describe is None:
        describe = _describe[kind] = _describer(value)
    return describe(value)


def _describer(value: Any) -> Callable[[Any], Any]:
    """Return how values of this type are described; asked once a type, since asking costs more than describing."""
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
    return id


def _signatures(*args: Any, **kwargs: Any) -> Any:
    return tuple([signature(a) for a in args]), signature(kwargs) if kwargs else None


def _tensor(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype, value.get_device(), value.requires_grad)


def _mask(mask: Any) -> Any:
    """Return a block mask's part of the signature, kept on the mask: it is refreshed in place, not made anew."""
    kept = mask.__dict__.get(_KEPT)
    if kept is None or kept[0] is not mask.mask_mod:
        found = (tuple(mask.shape), mask.BLOCK_SIZE, _closure(mask.mask_mod))
        # A number in its place: the whole of it would be hashed at every call.
        kept = (mask.mask_mod, _mask_numbers.setdefault(found, ("mask", next(_numbers))))
        mask.__dict__[_KEPT] = kept
    return kept[1]


def _closure(predicate: Any) -> Any:
    """Return what a predicate's compilation depends on: code, and by signature what it closes over."""
    code = getattr(predicate, "__code__", None)
    if code is None:
        return id(predicate)
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
            return compiled(*args, **kwargs)
        return self._first(key, args, kwargs)

    def _load(self) -> Any:
        import torch

        self._modes = torch.is_grad_enabled, torch._C._is_any_autocast_enabled
        self._traced = torch.compiler.is_dynamo_compiling
        return self._traced

    def _first(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch

        with first_call_lock():
            compiled = self._compiled.get(key)
            if compiled is not None:  # another thread was first
                return compiled(*args, **kwargs)
            self._meet_late_shape(key)
            compiled = torch.compile(_twin(self.function), **self._options)
            result = compiled(*args, **kwargs)
            self._compiled[key] = compiled
            return result

    def _meet_late_shape(self, key: Any) -> None:
        strict = _final
        if strict is None:
            return
        what = f"{self.name} meets a new signature after the shapes were said to be final: {key[0]}"
        if strict:
            raise CompilationError(f"{what}; it would be compiled again. Keep shapes fixed, or set strict off")
        _late[self.name] = _late.get(self.name, 0) + 1
        log.warning("%s (number %d)", what, _late[self.name])

    def signatures(self) -> int:
        """Return for how many signatures it has been compiled."""
        return len(self._compiled)

    def forget(self) -> None:
        """Drop every compiled object."""
        self._compiled.clear()


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
        signature(block_mask),
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
