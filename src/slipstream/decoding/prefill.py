"""Reading the prompts: one left-padded pass over a batch, on the target's own cache, as ordinary decoding does it.

Left padding puts every row's last token in the last column. It is exact for attention (the padding is masked and
positions count from each row's first real token) and for recurrent layers (the model zeroes padded inputs, and a zero
input leaves a zero state at zero). Plain and block decoding share this pass.

Shape letters: R rows, P padded prompt length, V vocabulary rows, K tapped layers, H hidden size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.decoding.equipment import short_blocks
from slipstream.errors import DecodingError
from slipstream.target.families import text_config
from slipstream.target.features import tap_layers

if TYPE_CHECKING:
    from slipstream.decoding.short_states import ShortBlocks
    from slipstream.target.model import Target


@dataclass(slots=True)
class Prefilled:
    """A batch after its prompts.

    cache: transformers' own cache, left-padded; logits ``[R, V]`` of the last prompt token; features ``[R, P, K*H]``,
    moved so that index equals position (beyond a row's length the last real feature is repeated), or None; lengths
    ``R`` prompt lengths on the host; pads ``[R]`` int64 on the device; mask ``[R, P]`` int64, or None when no row is
    padded.
    """

    cache: Any
    logits: Tensor
    features: Tensor | None
    lengths: list[int]
    pads: Tensor
    mask: Tensor | None


class DecoderCall:
    """Runs the target's decoder with a cache, whatever this transformers calls the argument. One for a decoding run."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.decoder = target.parts.decoder
        names = inspect.signature(self.decoder.forward).parameters
        self.cache_name = next((n for n in ("cache", "past_key_values") if n in names), "")
        if not self.cache_name:
            raise DecodingError(
                f"{type(self.decoder).__name__} takes neither cache nor past_key_values, so it cannot decode step "
                f"by step; "
                "use a target whose transformers class supports cached decoding"
            )

    @functools.cached_property
    def short_blocks(self) -> ShortBlocks:
        """The short blocks of the target's recurrent layers, with one verdict for all that share them."""
        return short_blocks(self.target)

    def new_cache(self) -> Any:
        """Return an empty cache with the layer kinds of the target's configuration."""
        from transformers import DynamicCache

        return DynamicCache(config=text_config(self.target.model.config))

    def __call__(self, ids: Tensor, *, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """Return the states after the final norm ``[R, T, H]`` for ids and positions ``[R, T]``."""
        output = self.decoder(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, **{self.cache_name: cache}
        )
        hidden: Tensor = output.last_hidden_state
        return hidden


def prefill(call: DecoderCall, prompts: Sequence[Sequence[int]], layer_ids: Sequence[int] | None) -> Prefilled:
    """Run the prompts in one pass; with ``layer_ids`` also read the context features. No gradient is kept."""
    target, device = call.target, call.target.device
    lengths = [len(p) for p in prompts]
    width = max(lengths)
    filler = target.info.pad_id if target.info.pad_id is not None and target.info.pad_id < target.info.vocab_rows else 0
    rows = [[filler] * (width - len(p)) + list(p) for p in prompts]
    ids = torch.tensor(rows, dtype=torch.long, device=device)
    pads = torch.tensor([width - n for n in lengths], dtype=torch.long, device=device)
    columns = torch.arange(width, device=device)
    positions = (columns[None, :] - pads[:, None]).clamp_(min=0)
    mask = (columns[None, :] >= pads[:, None]).long() if min(lengths) < width else None
    cache = call.new_cache()
    with tap_layers(target, layer_ids) if layer_ids is not None else nullcontext() as taps:
        hidden = call(ids, positions=positions, mask=mask, cache=cache)
    features = None
    if taps is not None:
        features = taps.features()
        if mask is not None:
            source = (columns[None, :] + pads[:, None]).clamp_(max=width - 1)
            features = features.gather(1, source[..., None].expand(-1, -1, features.shape[-1]))
    return Prefilled(
        cache=cache, logits=target.head(hidden[:, -1]), features=features, lengths=lengths, pads=pads, mask=mask
    )
