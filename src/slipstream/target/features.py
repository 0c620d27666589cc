"""Context features: the outputs of some of the target's decoder layers; and, for soft labels, its final states.

``target_layer_ids`` are 0-based layers whose *output* is read: id i is Hugging Face's ``hidden_states[i + 1]``. They
are read by hooks on the layers, because ``hidden_states[-1]`` is after the final norm and the others are not.

Packed rows: transformers keeps documents apart by position ids (a step other than +1 starts a document) where no
attention mask and no cache is given. Recurrent layers run on across documents; they are given the documents apart
(``recurrent``). Whether that holds for a family, a version, a kernel and an attention implementation is not taken on
trust: the reader probes it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.errors import TargetError
from slipstream.records import FeatureBatch, PackedBatch
from slipstream.target.families import has_chunks, recurrent_modules, text_config
from slipstream.target.kernels import on_device
from slipstream.target.layout import DocumentLayout, document_layout, padded_groups
from slipstream.target.model import Target
from slipstream.target.probe import PackingProbe
from slipstream.target.recurrent import WAYS, DocumentsApart, Way, arrangements


def validate_layer_ids(ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the ids as a tuple. Raises TargetError unless they are strictly increasing within 0 .. N-2.

    The last layer is refused: engines disagree on whether its state is taken before or after the final norm.
    """
    ids = tuple(ids)
    if not ids:
        raise TargetError("drafter.target_layer_ids is empty; name at least one layer")
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= num_layers - 2:
            last = " (the last layer, whose output engines norm differently)" if i == num_layers - 1 else ""
            raise TargetError(
                f"target layer id {i!r}{last} is not in 0 .. {num_layers - 2} of a target with {num_layers} layers; "
                "ids are 0-based and the last layer cannot be read"
            )
    if any(b <= a for a, b in pairwise(ids)):
        raise TargetError(
            f"target layer ids {list(ids)} are not strictly increasing; sort them and name each layer once"
        )
    return ids


class _Stop(Exception):
    """Ends a forward after the last tapped layer. Never leaves ``Taps``."""


class Taps:
    """Hooks on decoder layers, in place while the context is entered. Sees the entering thread's forwards only.

    Each forward replaces what the one before it left. With ``stop`` a forward ends after the last tapped layer: the
    statement that called it does not return, and the context ends there.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int], *, stop: bool = False) -> None:
        self._layers = [target.parts.layers[i] for i in layer_ids]
        self._stop = stop
        self._states: list[Tensor | None] = [None] * len(self._layers)
        self._handles: list[Any] = []
        self._thread = 0

    def __enter__(self) -> Taps:
        self._thread = threading.get_ident()
        for slot, layer in enumerate(self._layers):
            self._handles.append(layer.register_forward_hook(self._hook(slot)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return isinstance(error, _Stop)

    def _hook(self, slot: int) -> Any:
        last = slot == len(self._layers) - 1

        def hook(_module: Any, _args: Any, output: Any) -> None:
            if threading.get_ident() != self._thread:
                return
            self._states[slot] = output[0] if isinstance(output, tuple) else output
            if last and self._stop:
                raise _Stop

        return hook

    def features(self) -> Tensor:
        """Return the newest forward's outputs ``[..., K*H]`` in the order of the layer ids; TargetError if none ran."""
        states = [state for state in self._states if state is not None]
        if len(states) < len(self._states):
            raise TargetError(
                f"only {len(states)} of {len(self._states)} tapped layers ran; the target skips decoder layers"
            )
        return torch.cat(states, dim=-1)


def tap_layers(target: Target, layer_ids: Sequence[int], *, stop: bool = False) -> Taps:
    """Return a context that captures the outputs of ``layer_ids``: ``with tap_layers(target, ids) as taps: ...``."""
    return Taps(target, validate_layer_ids(layer_ids, target.info.num_layers), stop=stop)


class FeatureReader:
    """Reads the context features of packed batches. Not thread-safe: one per GPU thread, like its target.

    mode ``packed``: whole rows in one pass. mode ``unpacked``: each document alone, right-padded beside others of like
    length, which is exact because the target is causal. ``packing`` auto takes packed if a probe finds the features of
    packed documents to be those they have alone, and says so where it does not; packed raises TargetError instead.
    recurrent: how packed recurrent layers are given the documents apart (``recurrent.Way``), None where there are none;
    the first way that passes the probe is taken.
    reason: why documents are unpacked, or why a faster way was not taken; empty where there is nothing to tell.
    probe_difference: the largest relative difference that the probe found (0.0 where it was not run).
    ``final_states``: also read what the final norm gives, which the head would read: no forward stops early then, and
    the probe looks at these states too.
    """

    def __init__(
        self,
        target: Target,
        layer_ids: Sequence[int],
        packing: Literal["auto", "packed", "unpacked"] = "auto",
        *,
        final_states: bool = False,
    ) -> None:
        self.target = target
        self.layer_ids = validate_layer_ids(layer_ids, target.info.num_layers)
        self.final_states = final_states
        self._parts = len(self.layer_ids) + final_states  # of H numbers each, side by side until they are returned
        self.mode: Literal["packed", "unpacked"] = "unpacked"
        self.recurrent: Way | None = None
        self.probe_difference = 0.0
        self.reason = "" if packing != "unpacked" else "target.packing is unpacked"
        self._recurrent = recurrent_modules(target.parts, text_config(target.model.config))
        if packing == "unpacked":
            return
        if self._choose():
            self.mode = "packed"
        elif packing == "packed":
            raise TargetError(
                f"target {target.info.name} cannot be packed: {self.reason}; set target.packing to auto or unpacked"
            )
        else:
            print(f"target {target.info.name}: documents are read unpacked, because {self.reason}", file=sys.stderr)

    @property
    def packing(self) -> str:
        """What was chosen, in words: ``packed``, ``unpacked``, ``packed, recurrent layers by documents``."""
        return self.mode if self.recurrent is None else f"{self.mode}, recurrent layers by {self.recurrent}"

    @torch.no_grad()
    def read(self, batch: PackedBatch) -> FeatureBatch:
        """Return the batch on the target's device with features ``[R, S, K*H]`` in its dtype; padding has zeros.

        The forward stops after the last tapped layer, unless final states are read; the head never runs. Give the batch
        on the CPU: its layout is read on the host. Raises TargetError for ids outside the embedding, documents longer
        than the target's positions, and features that are not finite.
        """
        layout = document_layout(batch, self.target.info)
        batch = batch.to(self.target.device)
        if self.mode == "packed":
            features = self._read_packed(batch, layout)
        else:
            features = self._read_alone(batch, layout)
        self._check_finite(features, batch.index)
        if not self.final_states:
            return FeatureBatch(batch=batch, features=features)
        hidden = self.target.info.hidden_size
        taps, final = features.split((len(self.layer_ids) * hidden, hidden), dim=-1)
        return FeatureBatch(batch=batch, features=taps, final_states=final)

    def _forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Run the decoder on ``[rows, tokens]`` as far as need be and return ``[rows, tokens, parts*H]``."""
        final: list[Tensor] = []
        stop = not self.final_states
        with on_device(self.target.device), tap_layers(self.target, self.layer_ids, stop=stop) as taps:
            out = self.target.parts.decoder(input_ids=ids, position_ids=positions, use_cache=False)
            final.append(out.last_hidden_state)  # not reached by a forward that stops
        features = torch.cat((taps.features(), *final), dim=-1) if final else taps.features()
        expected = (*ids.shape, self._parts * self.target.info.hidden_size)
        if features.shape != expected:
            raise TargetError(
                f"target {self.target.info.name}: layer outputs are {list(features.shape)}, expected {list(expected)}"
            )
        return features

    def _read_packed(self, batch: PackedBatch, layout: DocumentLayout, bounds: bool = True) -> Tensor:
        """Read whole rows in one pass; padding has zeros. ``bounds`` False keeps them from recurrent kernels."""
        apart = () if self.recurrent is None else arrangements(self.recurrent, layout, self._recurrent)
        apart = apart if bounds else tuple(dataclasses.replace(one, bounds=None) for one in apart)
        with DocumentsApart(self._recurrent, apart, batch.ids.shape, self.target.device):
            features = self._forward(batch.ids, batch.positions)
        return features.masked_fill_((batch.document_ids < 0)[..., None], 0)

    def _read_alone(self, batch: PackedBatch, layout: DocumentLayout) -> Tensor:
        """Read each document alone and scatter the features back into the rows."""
        rows, tokens = batch.ids.shape
        width = self._parts * self.target.info.hidden_size
        out = torch.zeros(rows * tokens, width, dtype=self.target.dtype, device=self.target.device)
        flat = batch.ids.reshape(-1)
        for group in padded_groups(layout, budget=rows * tokens):
            source, inside, place = (
                t.to(self.target.device, non_blocking=True) for t in (group.source, group.inside, group.place)
            )
            found = self._forward(flat[source]).reshape(-1, width)
            out.index_copy_(0, place, found.index_select(0, inside))
        return out.view(rows, tokens, width)

    def _check_finite(self, features: Tensor, index: int) -> None:
        """Raise TargetError naming batch and rows where features are not finite."""
        parts = features.split(self.target.info.hidden_size, dim=-1)
        finite = torch.stack([torch.isfinite(part).flatten(1).all(dim=1) for part in parts]).cpu()
        if not bool(finite.all()):
            names = [*self.layer_ids, "final norm"]
            layers = [names[i] for i in range(len(parts)) if not bool(finite[i].all())]
            rows = (~finite.all(dim=0)).nonzero().flatten().tolist()
            raise TargetError(
                f"batch {index}: features of rows {rows} at layers {layers} are not finite ({self.target.info.dtype}); "
                "set target.dtype to bfloat16 or float32"
            )

    def _choose(self) -> bool:
        """Return whether packed rows are right. Sets ``recurrent``, ``reason`` and ``probe_difference``."""
        if has_chunks(text_config(self.target.model.config)):
            self.reason = "its layers attend within chunks of absolute positions, which a short probe cannot check"
            return False
        probe = PackingProbe(self.target, self._parts, lambda ids: self._forward(ids)[0])
        for way in WAYS if self._recurrent else (None,):
            self.recurrent = way
            runs_on = way is None and self.target.info.is_hybrid
            blame = "its recurrent state runs on across documents" if runs_on else "documents leak"
            without = functools.partial(self._read_packed, bounds=False) if way == "cu_seqlens" else None
            found, self.probe_difference = probe.judge(self._read_packed, blame, without)
            if not found:
                return True
            self.reason = found if way is None else f"with recurrent layers by {way}, {found}"
        self.recurrent = None
        return False
