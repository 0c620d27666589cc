"""Recurrent modules in packed rows: the documents are set apart for them alone, all else stays packed.

A module with a state from token to token (a Gated DeltaNet, say) runs on across the documents of a row. Two ways to
keep them apart:

* ``documents``, for any kernel: the module gets each document in a right-padded row, beside documents of like length.
  It is causal, so that the padding behind a document changes nothing.
* ``cu_seqlens``, for rules that reset their state at given bounds (FLA's kernels; transformers hands them over): the
  module gets one row with all documents. The convolution before the rule knows no bounds: it needs as many zeros
  behind each document as it looks back, which is what it sees before a document that stands alone, because a
  projection without bias makes zeros of zeros.

Neither is trusted: a reader probes them. A rule that has no bounds ignores them (transformers 5.16, 5.17) or raises
(5.24).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slipstream.errors import TargetError
from slipstream.target.layout import Arrangement, DocumentLayout, a_row_each, one_row

Way = Literal["documents", "cu_seqlens"]
WAYS: tuple[Way, ...] = ("cu_seqlens", "documents")  # no padding and one call comes first


def arrangements(way: Way, layout: DocumentLayout, modules: Sequence[nn.Module]) -> tuple[Arrangement, ...]:
    """Return how ``modules`` get the documents of a batch; on the CPU. Empty where its rows may be left as they are."""
    if not layout.documents:
        return ()
    if way == "cu_seqlens":
        return (one_row(layout, _look_back(modules)),)
    if all(document.start == 0 for document in layout.documents):  # each has a right-padded row already
        return ()
    return a_row_each(layout)


def _look_back(modules: Sequence[nn.Module]) -> int:
    """Return how many earlier tokens the modules' convolutions see."""
    convolutions = [m for module in modules for m in module.modules() if isinstance(m, nn.Conv1d)]
    return max((c.dilation[0] * (c.kernel_size[0] - 1) for c in convolutions), default=0)


class DocumentsApart:
    """Hooks on recurrent modules, in place while the context is entered. Sees the entering thread's forwards only.

    Whatever tensor a module is called with that has the batch's ``shape`` (rows, tokens) in front is arranged; its
    output is put back, with zeros in padding. Arrangements are moved to ``device`` here, once for all modules. One
    that is not called with such a tensor, or returns none of the arranged shape, raises TargetError.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        arranged: Sequence[Arrangement],
        shape: Sequence[int],
        device: torch.device,
    ) -> None:
        self._modules = modules if arranged else ()
        self._arranged = [arrangement.to(device) for arrangement in arranged]
        # The same two objects for every module: FLA derives its chunks from them once, and not on the device.
        self._keywords = [
            {} if there.bounds is None else {"cu_seq_lens_q": there.bounds, "cu_seqlens_cpu": here.bounds}
            for here, there in zip(arranged, self._arranged, strict=True)
        ]
        self._shape = tuple(shape)
        self._handles: list[Any] = []
        self._outputs: list[Any] = []
        self._calling = False
        self._thread = 0

    def __enter__(self) -> DocumentsApart:
        self._thread = threading.get_ident()
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._outputs.clear()

    def _not_ours(self) -> bool:
        """Return whether a call is another thread's, or one that a hook itself makes."""
        return self._calling or threading.get_ident() != self._thread

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Call the module with all arrangements but the last, and let the call that was hooked go on with that.

        Another thread's call that began while this hook was put in or taken out comes without keywords.
        """
        if kwargs is None or self._not_ours():
            return None
        self._calling = True
        try:
            self._outputs = []
            for number in range(len(self._arranged) - 1):
                some, named = self._call(number, module, args, kwargs)
                self._outputs.append(module(*some, **named))
        finally:
            self._calling = False
        return self._call(-1, module, args, kwargs)

    def _after(self, module: nn.Module, _args: Any, output: Any) -> Any:
        """Put the outputs back into the batch's rows."""
        if self._not_ours():
            return None
        outputs, self._outputs = [*self._outputs, output], []
        found = [out[0] if isinstance(out, tuple) else out for out in outputs]
        if any(not isinstance(f, Tensor) or f.shape[:2] != a.shape for f, a in zip(found, self._arranged, strict=True)):
            raise TargetError(f"{type(module).__name__} does not return one state for each token")
        whole = found[0].new_zeros(self._shape[0] * self._shape[1], *found[0].shape[2:])
        for states, arrangement in zip(found, self._arranged, strict=True):
            whole.index_copy_(0, arrangement.place, states.flatten(0, 1).index_select(0, arrangement.inside))
        whole = whole.unflatten(0, self._shape)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    def _call(
        self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with one arrangement."""
        arrangement = self._arranged[number]
        if not any(self._of_tokens(value) for value in (*args, *kwargs.values())):
            raise TargetError(f"{type(module).__name__} is not called with states of the batch's rows and tokens")

        def arrange(value: Any) -> Any:
            if not self._of_tokens(value):
                return value
            length = arrangement.shape[0] * arrangement.shape[1]
            rows = value.new_zeros(length, *value.shape[2:])
            rows.index_copy_(0, arrangement.inside, value.flatten(0, 1).index_select(0, arrangement.place))
            return rows.unflatten(0, arrangement.shape)

        named = {name: arrange(value) for name, value in kwargs.items()}
        return tuple(arrange(value) for value in args), {**named, **self._keywords[number]}

    def _of_tokens(self, value: Any) -> bool:
        """Return whether ``value`` holds something for each token of the batch."""
        return isinstance(value, Tensor) and value.shape[:2] == self._shape
