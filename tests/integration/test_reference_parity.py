"""The same weights and inputs in z-lab's own package (PyPI ``dflash``) and here: equal logits, fp32, 1e-5.

The weights travel through ``save_drafter``, so the exported directory is proved with them.
"""

from __future__ import annotations

import pytest
import torch
from dflash.model import DFlashDraftModel
from transformers import DynamicCache

from slipstream.drafter.attention import build_attention
from slipstream.drafter.config import FULL, SLIDING, DrafterConfig
from slipstream.drafter.model import DraftModel
from slipstream.drafter.store import load_drafter, save_drafter
from support.drafting import draw_blocks, normal, packed_batch, randomise, tiny_drafter_config

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(params=["full", "sliding", "mixed", "biased"])
def pair(request, tmp_path):
    """Our model and z-lab's, from one directory."""
    kinds = {"full": (FULL, FULL, FULL), "sliding": (SLIDING,) * 3, "mixed": (SLIDING, FULL, SLIDING)}
    types = kinds.get(request.param, (FULL, FULL, FULL))
    config = tiny_drafter_config(
        layers=3,
        layer_types=types,
        sliding_window=7 if SLIDING in types else 0,
        attention_bias=request.param == "biased",
        rope_theta=1e6,
        target_layer_ids=(1, 3, 5),
    )
    save_drafter(randomise(DraftModel(config)), config, tmp_path / "drafter", dtype=torch.float32)
    ours, read = load_drafter(tmp_path / "drafter")
    assert read == config
    theirs = DFlashDraftModel.from_pretrained(tmp_path / "drafter", dtype=torch.float32).eval()
    assert theirs.block_size == config.block_size
    assert theirs.mask_token_id == config.mask_token_id
    assert tuple(theirs.target_layer_ids) == config.target_layer_ids
    return ours.eval(), theirs, config


def logits(hidden: torch.Tensor, config: DrafterConfig) -> torch.Tensor:
    return hidden @ normal(config.vocab_size, config.hidden_size, seed=9, scale=0.1).T


def reference_block(theirs, features, noise, start):
    """z-lab's forward of one block after ``start`` context tokens."""
    position_ids = torch.arange(start + noise.shape[1])[None]
    return theirs(position_ids=position_ids, noise_embedding=noise, target_hidden=features)


@torch.no_grad()
def test_training_layout(pair):
    ours, theirs, config = pair
    batch = packed_batch([[14, 26]], 40)
    blocks = draw_blocks(batch, config, 10)
    features = normal(1, 40, config.context_size)
    noise = normal(1, 10, config.block_size, config.hidden_size, seed=2)
    attention = build_attention("dense", config, 1, 40, 10, "cpu")
    attention.update(blocks.anchors, blocks.document_start, blocks.keep)
    hidden = ours(features, noise.flatten(1, 2), batch.positions, blocks.positions.flatten(1), attention)
    hidden = hidden.view(10, config.block_size, -1)
    assert bool(blocks.keep.all())
    for n in range(10):
        start, anchor = int(blocks.document_start[0, n]), int(blocks.anchors[0, n])
        expected = reference_block(theirs, features[:, start:anchor], noise[:, n], anchor - start)[0]
        torch.testing.assert_close(logits(hidden[n], config), logits(expected, config), **TOLERANCE)


@torch.no_grad()
def test_decoding_with_a_cached_context(pair):
    """Each round adds the features of the tokens committed since, drafts a block, and drops the block's own KV."""
    ours, theirs, config = pair
    cache = DynamicCache()
    kv = None
    committed = 0
    for turn, new in enumerate((11, 1, 4, 3)):
        features = normal(1, new, config.context_size, seed=20 + turn)
        noise = normal(1, config.block_size, config.hidden_size, seed=40 + turn)
        positions = torch.arange(committed, committed + new + config.block_size)[None]
        expected = theirs(
            position_ids=positions,
            noise_embedding=noise,
            target_hidden=features,
            past_key_values=cache,
            use_cache=True,
        )
        cache.crop(-config.block_size)
        fresh = ours.context_kv(features, positions[:, :new])
        if kv is not None:
            fresh = [
                (torch.cat((k, more_k), 2), torch.cat((v, more_v), 2))
                for (k, v), (more_k, more_v) in zip(kv, fresh, strict=True)
            ]
        kv = fresh
        committed += new
        assert cache.get_seq_length() == committed == kv[0][0].shape[2]
        hidden = ours.draft(noise, positions[:, new:], kv, context_positions=torch.arange(committed)[None])
        torch.testing.assert_close(logits(hidden, config), logits(expected, config), **TOLERANCE)
