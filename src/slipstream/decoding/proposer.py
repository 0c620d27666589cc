"""Where drafts come from: the drafter, behind the small interface that the decoding loop calls.

Shape letters: R rows, Q block tokens (anchor and Q-1 masks), T context tokens, K tapped layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from slipstream.decoding.ragged import round_up
from slipstream.errors import DecodingError, DrafterError, TargetError
from slipstream.target.features import validate_layer_ids

if TYPE_CHECKING:
    from slipstream.drafter.config import DrafterConfig
    from slipstream.drafter.model import DraftModel
    from slipstream.target.model import Target, TargetInfo


class Proposer(Protocol):
    """Drafts for one batch at a time. ``layer_ids``: target layers to tap, or None when no features are needed."""

    layer_ids: tuple[int, ...] | None

    def start(self, indices: Sequence[int], lengths: Sequence[int], features: Tensor | None, capacity: int) -> None:
        """Begin a batch: prompt indices and lengths, features ``[R, T, K*H]`` by position, most positions ever."""

    def propose(self, anchors: Tensor, starts: Sequence[int], drafts: int) -> Tensor:
        """Return ``drafts`` greedy drafts ``[R, drafts]`` int64 for anchors ``[R]`` int64 at positions ``starts``."""

    def observe(self, features: Tensor | None, starts: Sequence[int]) -> None:
        """Take the features ``[R, Q, K*H]`` of a verified block; those at or after the next anchor do not count."""

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every row that is not in ``rows``."""


def check_drafter(config: DrafterConfig, info: TargetInfo) -> None:
    """Refuse a drafter that was made for another target. Raises DrafterError naming the field and both values."""
    for name, mine, field, its in (
        ("hidden_size", config.hidden_size, "hidden size", info.hidden_size),
        ("vocab_size", config.vocab_size, "embedding rows", info.vocab_rows),
        ("num_target_layers", config.num_target_layers, "layers", info.num_layers),
    ):
        if mine != its:
            raise DrafterError(
                f"the drafter's {name} is {mine} but target {info.name} has {its} ({field}); use the target it was "
                f"trained for"
            )
    try:
        validate_layer_ids(config.target_layer_ids, info.num_layers)
    except TargetError as error:
        raise DrafterError(f"the drafter does not fit target {info.name}: {error}") from None
    if not 0 <= config.mask_token_id < info.vocab_rows:
        raise DrafterError(
            f"the drafter's mask_token_id is {config.mask_token_id}, outside the target's {info.vocab_rows} "
            f"embedding rows; "
            "use the target it was trained for"
        )


def resolve_block_size(config: DrafterConfig, requested: int | None) -> int:
    """Return the block size to decode with: the trained one, or a shorter one. Raises DecodingError otherwise."""
    if requested is None:
        return config.block_size
    if not 2 <= requested <= config.block_size:
        raise DecodingError(
            f"block_size is {requested}, but the drafter was trained with {config.block_size}; use 2 to "
            f"{config.block_size}"
        )
    return requested


class DrafterProposer:
    """Drafts by the drafter; embedding and head are the target's. One per GPU thread.

    Context keys and values live in buffers where index equals position. A row's context is what lies before its anchor:
    features of rejected tokens are written too, but stay masked until a committed token's overwrite them.

    ``whole_block``: fill every slot of the trained block whatever is asked for, and return the first drafts. A slot
    attends to the later ones, so a drafter that has only seen whole blocks drafts better so; servers do not.
    """

    def __init__(
        self, target: Target, draft_model: DraftModel, config: DrafterConfig, *, whole_block: bool = False
    ) -> None:
        check_drafter(config, target.info)
        self._least_slots = config.block_size if whole_block else 0
        self.layer_ids: tuple[int, ...] | None = tuple(config.target_layer_ids)
        self._target, self._model, self._config = target, draft_model, config
        self.network: nn.Module = draft_model
        weight = next(draft_model.parameters())
        self._dtype = weight.dtype
        if weight.device != target.device:
            raise DecodingError(
                f"the drafter is on {weight.device} but the target on {target.device}; move one of them"
            )
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._capacity = 0

    def start(self, indices: Sequence[int], lengths: Sequence[int], features: Tensor | None, capacity: int) -> None:
        """Fill the context from the prompts' features."""
        assert features is not None
        rows, width = features.shape[:2]
        self._capacity = round_up(capacity)
        positions = torch.arange(width, device=features.device).expand(rows, -1)
        self._buffers = []
        for keys, values in self._model.context_kv(features.to(self._dtype), positions):
            heads, size = keys.shape[1], keys.shape[3]
            pair = (
                keys.new_zeros(rows, heads, self._capacity, size),
                values.new_zeros(rows, heads, self._capacity, size),
            )
            pair[0][:, :, :width], pair[1][:, :, :width] = keys, values
            self._buffers.append(pair)

    def propose(self, anchors: Tensor, starts: Sequence[int], drafts: int) -> Tensor:
        """Draft one block for each row in one pass of the drafter."""
        device = anchors.device
        first = torch.tensor(starts, device=device)[:, None]
        slots = max(drafts + 1, self._least_slots)
        block = torch.full((len(starts), slots), self._config.mask_token_id, dtype=torch.long, device=device)
        block[:, 0] = anchors
        width = min(round_up(max(starts)), self._capacity)
        context = torch.arange(width, device=device)
        hidden = self._model.draft(
            self._target.embed(block).to(self._dtype),
            first + torch.arange(slots, device=device),
            [(keys[:, :, :width], values[:, :, :width]) for keys, values in self._buffers],
            context_mask=(context < first)[:, None, None, :],
            context_positions=context.expand(len(starts), -1),
        )
        return self._target.head(hidden[:, 1 : drafts + 1]).argmax(dim=-1)

    def observe(self, features: Tensor | None, starts: Sequence[int]) -> None:
        """Append a verified block's features to the context buffers."""
        assert features is not None
        rows, length = features.shape[:2]
        first = torch.tensor(starts, device=features.device)[:, None]
        positions = first + torch.arange(length, device=features.device)
        index = torch.arange(rows, device=features.device)[:, None]
        new = self._model.context_kv(features.to(self._dtype), positions)
        for (keys, values), (new_keys, new_values) in zip(self._buffers, new, strict=True):
            keys[index, :, positions] = new_keys.transpose(1, 2).to(keys.dtype)
            values[index, :, positions] = new_values.transpose(1, 2).to(values.dtype)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every row that is not in ``rows``."""
        index = torch.tensor(rows, device=self._target.device)
        self._buffers = [(keys[index], values[index]) for keys, values in self._buffers]
