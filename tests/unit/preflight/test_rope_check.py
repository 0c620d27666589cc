"""``rope`` sees rotary embeddings that are rounded, cut, interleaved, of another base, or lost on the disk."""

from __future__ import annotations

import torch

from slipstream.drafter import model as model_module
from slipstream.drafter.config import DrafterConfig
from slipstream.preflight import CHEAP

ALL = tuple(CHEAP)


def replace_tables(monkeypatch, make) -> None:
    genuine = model_module.rotary_tables
    monkeypatch.setattr(model_module, "rotary_tables", lambda positions, d, theta: make(genuine, positions, d, theta))


def test_frequencies_rounded_to_bfloat16_are_rope(run, verdict, monkeypatch) -> None:
    def rounded(genuine, positions, d, theta):
        steps = torch.arange(0, d, 2, dtype=torch.float32)
        frequencies = (1.0 / theta ** (steps / d)).bfloat16().float()
        angles = positions[:, None, :, None].float() * frequencies
        return angles.cos(), angles.sin()

    replace_tables(monkeypatch, rounded)
    failed = verdict(run, *ALL)
    assert set(failed) == {"rope"}
    assert "float32 frequencies" in failed["rope"]


def test_another_base_is_rope(run, verdict, monkeypatch) -> None:
    replace_tables(monkeypatch, lambda genuine, p, d, theta: genuine(p, d, theta * 100))
    assert set(verdict(run, *ALL)) == {"rope"}


def test_a_partial_rotary_embedding_is_rope(run, verdict, monkeypatch) -> None:
    def partial(genuine, p, d, theta):
        cos, sin = genuine(p, d, theta)
        return torch.where(torch.arange(d // 2) < d // 4, cos, 1.0), torch.where(
            torch.arange(d // 2) < d // 4, sin, 0.0
        )

    replace_tables(monkeypatch, partial)
    assert set(verdict(run, *ALL)) == {"rope"}


def test_an_interleaved_layout_is_rope(run, verdict, monkeypatch) -> None:
    def interleaved(x, tables):
        cos, sin = tables
        even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)

    monkeypatch.setattr(model_module, "rotate", interleaved)
    assert set(verdict(run, *ALL)) == {"rope"}


def test_positions_that_start_at_one_for_the_context_are_rope(run, verdict, monkeypatch) -> None:
    genuine = model_module.DraftModel.context_kv
    monkeypatch.setattr(model_module.DraftModel, "context_kv", lambda self, f, p: genuine(self, f, p + 1))
    assert "rope" in verdict(run, "rope")


def test_no_rotary_embedding_at_all_is_rope(run, verdict, monkeypatch) -> None:
    monkeypatch.setattr(model_module, "rotate", lambda x, tables: x)
    assert "rope" in verdict(run, "rope")


def test_another_base_on_the_disk_is_rope(run, verdict, monkeypatch) -> None:
    genuine = DrafterConfig.to_json

    def other(self, *args):
        return {**genuine(self, *args), "rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}

    monkeypatch.setattr(DrafterConfig, "to_json", other)
    failed = verdict(run, *ALL)
    assert set(failed) == {"rope"}
    assert "rope_parameters" in failed["rope"]


def test_a_dialect_missing_on_the_disk_is_rope(run, verdict, monkeypatch) -> None:
    genuine = DrafterConfig.to_json

    def lost(self, *args):
        tree = genuine(self, *args)
        del tree["rope_theta"]
        return tree

    monkeypatch.setattr(DrafterConfig, "to_json", lost)
    assert "rope_theta None" in verdict(run, "rope")["rope"]


def test_a_base_that_is_not_the_recipes_is_rope(run, changed, verdict) -> None:
    failed = verdict(changed(run, rope_theta=7.0), "rope")
    assert "rope_theta is 7" in failed["rope"]


def test_a_rotary_buffer_is_rope(run, verdict) -> None:
    run.draft_model.register_buffer("inv_freq", torch.zeros(2), persistent=False)
    try:
        assert "inv_freq" in verdict(run, "rope")["rope"]
    finally:
        del run.draft_model.inv_freq
