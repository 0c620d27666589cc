"""Tiny targets of every family, loaded once; a multimodal one; and packed batches with known documents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config import TargetConfig
from slipstream.records import PackedBatch
from slipstream.target.model import Target, load_target
from support.tiny import save_tiny_target, tiny_config, tiny_tokenizer

CPU = torch.device("cpu")
# Documents of one token, of more than gemma3's window (24), and of more than the delta rule's chunk (64); padding in
# two rows; one row that is a single document.
LENGTHS = ((3, 30, 1, 40), (70, 20, 4), (90,))
TOKENS = 96


def packed_batch(lengths: Sequence[Sequence[int]] = LENGTHS, tokens: int = TOKENS, seed: int = 5) -> PackedBatch:
    """Return a packed batch with random ids; document ids count on through the rows."""
    ids = torch.randint(0, 256, (len(lengths), tokens), generator=torch.Generator().manual_seed(seed))
    documents = torch.full_like(ids, -1)
    positions = torch.zeros_like(ids)
    number = 0
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            documents[row, start : start + length] = number
            positions[row, start : start + length] = torch.arange(length)
            number, start = number + 1, start + length
    return PackedBatch(index=7, ids=ids, loss_mask=documents >= 0, document_ids=documents, positions=positions)


def documents_of(batch: PackedBatch) -> list[tuple[int, slice]]:
    """Return row and place of each document, found token by token."""
    found: dict[int, list[tuple[int, int]]] = {}
    for row in range(batch.ids.shape[0]):
        for token in range(batch.ids.shape[1]):
            number = int(batch.document_ids[row, token])
            if number >= 0:
                found.setdefault(number, []).append((row, token))
    return [(where[0][0], slice(where[0][1], where[-1][1] + 1)) for where in found.values()]


def save_multimodal(directory: Path) -> Path:
    """Write a tiny Qwen3.5 with its vision tower, as the published multimodal checkpoints are written."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    torch.manual_seed(3)
    config = Qwen3_5Config(
        text_config=tiny_config("qwen3_5").to_dict(),
        vision_config={**vision, "num_position_embeddings": 16, "patch_size": 4},
        tie_word_embeddings=True,
    )
    Qwen3_5ForConditionalGeneration(config).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a family's tiny target. Tests must not write to it."""

    @functools.cache
    def save(family: str) -> Path:
        return save_tiny_target(tmp_path_factory.mktemp(family) / "target", family)

    return save


@pytest.fixture(scope="session")
def target_of(directory_of: Callable[[str], Path]) -> Callable[[str], Target]:
    """Return a family's tiny target in float32, loaded once."""

    @functools.cache
    def load(family: str) -> Target:
        return load_in(directory_of(family))

    return load


@pytest.fixture(scope="session")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the whole multimodal model, vision tower included, and its directory."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

    directory = save_multimodal(tmp_path_factory.mktemp("multimodal") / "target")
    return Qwen3_5ForConditionalGeneration.from_pretrained(directory).eval(), directory


def load_in(directory: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Target:
    """Load a target on the CPU."""
    return load_target(TargetConfig(path=str(directory), **settings), device=CPU, dtype=dtype)
