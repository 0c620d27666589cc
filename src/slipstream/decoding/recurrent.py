"""Rolling back recurrent layers (Gated DeltaNet and its kin), which have absorbed the rejected tokens.

Their states are saved before a verify pass. Afterwards, for the rows that rejected something, there are two ways:

* *replay*, for any family and the reference: each recurrent module, whose call was recorded, runs again from the saved
  state over the row's accepted tokens, rows of one count together. MLPs, attention and head do not run again.
* *calculate*, for Gated DeltaNets with separate projections: all layers and rows in one calculation from the input
  projections that the pass computed (``delta_rule``). It must prove itself first: on the first pass of a batch it has
  to arrive at the states that the modules reached over the whole block. Where it does not, replay is used, and that
  is said.

On a CPU, Gated DeltaNets in float32 do not absorb a pass at all: they run it as short blocks (``short_states``), which
leave their states alone and need neither of the two ways. Those too must prove themselves first.

The trap: a transformers cache that records its past crops such a layer without an error, and restores its convolution
but not its recurrent state.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from slipstream.decoding.delta_rule import PROJECTIONS, advance_layers, is_gated_delta
from slipstream.decoding.short_states import ShortBlocks, ShortPass, difference
from slipstream.errors import DecodingError
from slipstream.target.rules import kernels_run_on

_STATE_FIELDS = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)
# Relative. A wrong formula is off by about 1; rounding of kernels (tensor-float products included) stays far below.
_TOLERANCE = 1e-3
_TOLERANCE_LOW = 2e-2

State = dict[str, dict[int, Any]]


@dataclass(slots=True)
class RecordedCall:
    """A recurrent module and what it was called with in the verify pass."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class RecurrentStates:
    """Saves the recurrent layers ``numbers`` of one cache and rolls them back. One per GPU thread.

    ``short``: the decoding run's short blocks, tried where they cover the layers; None never uses them. ``calculate``
    False always replays what they do not run. Raises DecodingError for a cache layer whose state cannot be saved.
    """

    def __init__(
        self, cache: Any, numbers: Sequence[int], *, short: ShortBlocks | None = None, calculate: bool = True
    ) -> None:
        self.cache, self.numbers = cache, tuple(numbers)
        for number in self.numbers:
            layer = cache.layers[number]
            missing = [name for name in _STATE_FIELDS if not isinstance(getattr(layer, name, None), dict)]
            if missing:
                raise DecodingError(
                    f"layer {number} of the target keeps a {type(layer).__name__} without {missing[0]}, which block "
                    "decoding cannot save; use a transformers release from 5.16 to 5.24"
                )
        self.short = ShortPass(short, cache) if short is not None and short.cover(cache, self.numbers) else None
        self.calculate = calculate
        self._proven = False
        self._recording = False
        self._length = 0
        self._saved: dict[int, State] = {}
        self._calls: dict[int, RecordedCall] = {}
        self._projected: dict[int, dict[str, Tensor]] = {}

    def hook(self, layers: Any) -> list[Any]:
        """Hook the target's decoder ``layers`` to record the recurrent modules' calls; return the handles.

        The hooks also tell the PyTorch delta rule how long the block is: left alone it pads every block to 64 tokens.
        """
        handles = []
        for number in self.numbers:
            for child in layers[number].children():
                handles.append(child.register_forward_pre_hook(self._call_recorder(number), with_kwargs=True))
                if is_gated_delta(child):
                    for name in PROJECTIONS:
                        recorder = self._projection_recorder(number, name)
                        handles.append(getattr(child, name).register_forward_hook(recorder))
        if self.short is not None:
            self.short.install()
            handles.append(self.short)
        return handles

    def _call_recorder(self, number: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not (self._recording and any(value is self.cache for value in (*args, *kwargs.values()))):
                return None
            if self._length and is_gated_delta(module) and _takes_chunk_size(module):
                kwargs = {**kwargs, "chunk_size": self._length}
            self._calls[number] = RecordedCall(module, args, kwargs)
            return args, kwargs

        return hook

    def _projection_recorder(self, number: int, name: str) -> Any:
        def hook(_module: Any, _args: Any, output: Tensor) -> None:
            if self._recording:
                self._projected.setdefault(number, {})[name] = output

        return hook

    def save(self, length: int) -> None:
        """Copy all states (clones: the layers write in place) and record the pass of ``length`` tokens to come.

        A pass of one token keeps it or drops the row, and short blocks write nothing: neither needs a copy.
        """
        self.forget()
        if self.short is not None:
            self.short.begin(length)
        if length == 1 or (self.short is not None and self.short.proven):
            return
        self._length = length
        self._saved = {number: _copy_state(self.cache.layers[number]) for number in self.numbers}
        self._recording = True

    def stop_recording(self) -> None:
        """End the recorded pass."""
        self._recording = False

    def forget(self) -> None:
        """Let go of saved states and recorded inputs."""
        self._recording = False
        self._saved, self._calls, self._projected = {}, {}, {}

    def roll_back(self, counts: Sequence[int], length: int, device: torch.device) -> None:
        """Set each row's states to those after its first ``counts[r]`` of the ``length`` tokens of the pass.

        A count of 0 marks a row that is dropped next: its states are left as they are. A row that keeps its whole block
        has the right states already, unless the pass was short blocks'.
        """
        if self.short is not None and self.short.commit(counts):
            return
        members = [row for row, count in enumerate(counts) if 0 < count < length]
        if not (self.numbers and members):
            return
        for number in self.numbers:
            if number not in self._calls:
                raise DecodingError(
                    f"layer {number} of the target keeps a recurrent state, but no module in it is called with the "
                    "cache; this family is not supported"
                )
        if self.calculate and not self._proven:
            self.calculate = self._prove(len(counts), length, device)
        if self.calculate:
            self._calculate(members, [counts[row] for row in members], device)
            return
        for count in sorted({counts[row] for row in members}):
            rows = torch.tensor([row for row in members if counts[row] == count], device=device)
            for number in self.numbers:
                self._replay(number, rows, count, (len(counts), length))

    def _replay(self, number: int, rows: Tensor, count: int, shape: tuple[int, int]) -> None:
        """Run one module again for ``rows`` over the first ``count`` tokens, and write its states back."""
        full, call = self.cache.layers[number], self._calls[number]
        part = copy.copy(full)
        for name, value in self._saved[number].items():
            setattr(part, name, {i: v[rows] if isinstance(v, Tensor) else v for i, v in value.items()})
        layers = list(self.cache.layers)
        layers[number] = part
        cache = Cache(layers=layers)

        def cut(value: Any) -> Any:
            if value is self.cache:
                return cache
            if isinstance(value, Tensor) and value.shape[:2] == shape:
                return value[rows, :count]
            return value

        call.module(*(cut(a) for a in call.args), **{k: cut(v) for k, v in call.kwargs.items()})
        for name in ("conv_states", "recurrent_states"):
            for i, value in getattr(part, name).items():
                if isinstance(value, Tensor):
                    getattr(full, name)[i][rows] = value

    def _advanced(self, rows: Tensor, counts: Tensor, most: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the calculated convolution and recurrent states of ``rows``, layer by layer."""
        return advance_layers(
            [self._calls[n].module for n in self.numbers],
            [self._projected[n] for n in self.numbers],
            [self._saved[n]["conv_states"][0] for n in self.numbers],
            [self._saved[n]["recurrent_states"][0] for n in self.numbers],
            rows,
            counts,
            most,
        )

    def _calculate(self, members: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        """Roll ``members`` back by calculation."""
        rows = torch.tensor(members, device=device)
        conv, states = self._advanced(rows, torch.tensor(counts, device=device), max(counts))
        for number, new_conv, new_state in zip(self.numbers, conv, states, strict=True):
            layer = self.cache.layers[number]
            layer.conv_states[0][rows] = new_conv.to(layer.conv_states[0].dtype)
            layer.recurrent_states[0][rows] = new_state.to(layer.recurrent_states[0].dtype)

    def _prove(self, rows: int, length: int, device: torch.device) -> bool:
        """Return whether the calculation reaches the states that the modules reached over the whole block."""
        suited = all(
            self._projected.get(n, {}).keys() == set(PROJECTIONS)
            and is_gated_delta(self._calls[n].module)
            and self.cache.layers[n].conv_states.keys() == self.cache.layers[n].recurrent_states.keys() == {0}
            for n in self.numbers
        )
        if not suited:
            return False
        everyone = torch.arange(rows, device=device)
        conv, states = self._advanced(everyone, torch.full_like(everyone, length), length)
        differences = []
        for number, new_conv, new_state in zip(self.numbers, conv, states, strict=True):
            layer = self.cache.layers[number]
            differences.append(difference(new_conv, layer.conv_states[0]))
            differences.append(difference(new_state, layer.recurrent_states[0]))
        largest = float(torch.stack(differences).max())
        dtype = self._projected[self.numbers[0]][PROJECTIONS[0]].dtype
        self._proven = largest <= (_TOLERANCE if dtype == torch.float32 else _TOLERANCE_LOW)
        if not self._proven:
            print(
                f"recurrent layers are rolled back by running their modules again: the calculated states differ from "
                f"theirs by {largest:.2g}",
                file=sys.stderr,
            )
        return self._proven


def _takes_chunk_size(module: Any) -> bool:
    """Return whether PyTorch's rule runs ``module``; FLA's kernels, wherever they can run, choose their own chunks."""
    return not (kernels_run_on(module.A_log.device) and _fla_is_found())


@functools.cache
def _fla_is_found() -> bool:
    """Return whether FLA can be imported. Asked at every layer of every pass, and a search through all of the path."""
    return find_spec("fla") is not None


def _copy_state(layer: Any) -> State:
    """Return a layer's state with its tensors cloned."""
    return {name: dict(_cloned(getattr(layer, name).items())) for name in _STATE_FIELDS}


def _cloned(items: Iterable[tuple[int, Any]]) -> Iterable[tuple[int, Any]]:
    """Yield the items with tensors cloned."""
    return ((i, v.clone() if isinstance(v, Tensor) else v) for i, v in items)
