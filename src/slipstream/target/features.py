"""Context features: the outputs of some of the target's decoder layers; and, for soft labels, its final states.

``target_layer_ids`` are 0-based layers whose *output* is read: id i is Hugging Face's ``hidden_states[i + 1]``. They
are read by hooks on the layers, because ``hidden_states[-1]`` is after the final norm and the others are not.

Packed rows: transformers keeps documents apart by position ids (a step other than +1 starts a document) where no
attention mask and no cache is given. Whether that holds for a family, a version and an attention implementation is not
taken on trust: the reader probes it. Recurrent layers, for one, run on across documents.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.data.reason import one_line
from slipstream.errors import TargetError
from slipstream.records import FeatureBatch, PackedBatch
from slipstream.target.families import has_chunks, text_config
from slipstream.target.kernels import on_device
from slipstream.target.layout import DocumentLayout, document_layout, padded_groups
from slipstream.target.model import Target, tokenizer_entries

# float32 on a CPU: every token of every tap must agree. Otherwise rounding differs with the shape of a matmul, so that
# a change in other documents must leave a document (nearly) as it was, and half of its tokens must be as alone.
_TOLERANCE = 1e-3
_LEAK_TOLERANCE_LOW = 2e-2
_MEDIAN_TOLERANCE_LOW = 0.1


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
        self.probe_difference = 0.0
        self.reason = "" if packing != "unpacked" else "target.packing is unpacked"
        if packing == "unpacked":
            return
        self.reason = self._probe()
        if not self.reason:
            self.mode = "packed"
        elif packing == "packed":
            raise TargetError(
                f"target {target.info.name} cannot be packed: {self.reason}; set target.packing to auto or unpacked"
            )
        else:
            print(f"target {target.info.name}: documents are read unpacked, because {self.reason}", file=sys.stderr)

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
            features = self._forward(batch.ids, batch.positions)
            features.masked_fill_((batch.document_ids < 0)[..., None], 0)
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

    @torch.no_grad()
    def _probe(self) -> str:
        """Return why packed rows would be wrong, or nothing. Sets ``probe_difference``."""
        if has_chunks(text_config(self.target.model.config)):
            return "its layers attend within chunks of absolute positions, which a short probe cannot check"
        first, second = _probe_batches(self.target)
        layout = document_layout(first, self.target.info)
        first, second = first.to(self.target.device), second.to(self.target.device)
        exact = self.target.dtype == torch.float32 and self.target.device.type == "cpu"
        try:
            packed = self._forward(first.ids, first.positions)
            other = None if exact else self._forward(second.ids, second.positions)
        except (ValueError, TypeError, NotImplementedError) as error:
            return f"it refuses packed rows: {one_line(error)}"
        parity, leak = [], [torch.zeros(1)]
        for document in layout.documents:
            place = (document.row, slice(document.start, document.end))
            alone = self._forward(first.ids[document.row : document.row + 1, place[1]])[0]
            parity.append(self._difference(packed[place], alone))
            if other is not None and torch.equal(first.ids[place], second.ids[place]):
                leak.append(self._difference(packed[place], other[place]))
        apart, leaked = torch.cat(parity), torch.cat(leak)
        self.probe_difference = float(apart.max())
        if exact:
            sound = self.probe_difference <= _TOLERANCE
        else:
            # Experts get other numbers of tokens when other documents change; rounding may then reroute a few tokens.
            reached = leaked.quantile(0.75 if self.target.info.is_moe else 1.0)
            sound = float(reached) <= _LEAK_TOLERANCE_LOW and float(apart.median()) <= _MEDIAN_TOLERANCE_LOW
        if not sound:
            why = "its recurrent state runs on across documents" if self.target.info.is_hybrid else "documents leak"
            return f"{why} (packed and alone differ by {self.probe_difference:.2g} of a feature's size)"
        return ""

    def _difference(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the relative difference of each token and part of two ``[tokens, parts*H]``, on the CPU."""
        a, b = (t.float().reshape(len(t), self._parts, -1) for t in (a, b))
        relative: Tensor = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-12)
        return relative.flatten().cpu()


def _probe_batches(target: Target) -> tuple[PackedBatch, PackedBatch]:
    """Return two small packed batches: the second has other tokens in every other document."""
    lengths = ((3, 14, 26, 1), (18, 30))
    tokens = 48
    generator = torch.Generator().manual_seed(0)
    entries = tokenizer_entries(target.tokenizer)
    ids = torch.randint(entries, (len(lengths), tokens), generator=generator)
    changed = torch.randint(entries, (len(lengths), tokens), generator=generator)
    documents = torch.full((len(lengths), tokens), -1)
    positions = torch.zeros(len(lengths), tokens, dtype=torch.long)
    number = 0
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            place = (row, slice(start, start + length))
            documents[place], positions[place] = number, torch.arange(length)
            if number % 2:
                changed[place] = ids[place]
            number, start = number + 1, start + length
    mask = documents >= 0
    return tuple(  # type: ignore[return-value]
        PackedBatch(index=-1, ids=i, loss_mask=mask, document_ids=documents, positions=positions)
        for i in (ids, changed)
    )
