"""``render-parity`` and ``mask-token`` see ids and masks that a server would not see."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slipstream.config import DataConfig, DrafterSettings, Recipe, RunConfig, TargetConfig
from slipstream.data.render import Renderer
from slipstream.drafter import anchors as anchors_module
from slipstream.preflight import CHEAP
from slipstream.records import RenderedSample
from slipstream.training.session import prepare
from support.tiny import THINKING, save_tiny_target

ALL = tuple(CHEAP)


def rerender(monkeypatch: pytest.MonkeyPatch, change) -> None:
    genuine = Renderer.render

    def render(self, conversation):
        return [change(sample) for sample in genuine(self, conversation)]

    monkeypatch.setattr(Renderer, "render", render)


def with_mask(sample: RenderedSample, mask: np.ndarray) -> RenderedSample:
    return RenderedSample(ids=sample.ids, loss_mask=mask, origin=sample.origin)


def test_a_supervised_generation_prompt_is_render_parity(run, verdict, monkeypatch) -> None:
    """The header before each answer is the server's."""

    def early(sample):
        mask = sample.loss_mask.copy()
        starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
        mask[starts - 1] = True
        return with_mask(sample, mask)

    rerender(monkeypatch, early)
    failed = verdict(run, *ALL)
    assert set(failed) == {"render-parity"}
    assert "a server's prompt supplies it" in failed["render-parity"]


def test_a_supervised_user_turn_is_render_parity(run, verdict, monkeypatch) -> None:
    rerender(monkeypatch, lambda s: with_mask(s, np.ones_like(s.loss_mask)))
    assert set(verdict(run, *ALL)) == {"render-parity"}


def test_a_first_answer_token_without_supervision_is_render_parity(run, verdict, monkeypatch) -> None:
    rerender(monkeypatch, lambda s: with_mask(s, np.concatenate([[False], s.loss_mask[:-1]])))
    assert set(verdict(run, *ALL)) == {"render-parity"}


def test_ids_that_a_server_does_not_prefill_are_render_parity(run, verdict, monkeypatch) -> None:
    """A beginning-of-text token too many."""

    def extra(sample):
        ids = np.concatenate([[261], sample.ids]).astype(np.int32)
        return RenderedSample(ids=ids, loss_mask=np.concatenate([[False], sample.loss_mask]), origin=sample.origin)

    rerender(monkeypatch, extra)
    failed = verdict(run, *ALL)
    assert set(failed) == {"render-parity"}
    assert "a server prefills" in failed["render-parity"]


def test_another_prompt_for_decoding_is_render_parity(run, verdict, monkeypatch) -> None:
    genuine = Renderer.prompt_ids
    monkeypatch.setattr(Renderer, "prompt_ids", lambda self, c: [261, *genuine(self, c)])
    assert set(verdict(run, *ALL)) == {"render-parity"}


def test_rows_of_other_data_are_render_parity(run, verdict, tmp_path) -> None:
    from support.tiny import write_conversations

    other = write_conversations(tmp_path / "other.jsonl", 3, turns=1)
    text = other.read_text().replace("Answer", "Reply")
    other.write_text(text)
    data = dataclasses.replace(run.recipe.data, train=(str(other),))
    failed = verdict(dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, data=data)), "render-parity")
    assert "in no packed row" in failed["render-parity"]


def test_nothing_supervised_is_render_parity(run, verdict) -> None:
    report = dataclasses.replace(run.dataset.report, supervised=0)
    dataset = object.__new__(type(run.dataset))
    dataset.__dict__.update({**run.dataset.__dict__, "report": report})
    failed = verdict(dataclasses.replace(run, dataset=dataset), "render-parity")
    assert "no token is supervised" in failed["render-parity"]


@pytest.mark.parametrize("thinking", ["auto", "on", "off"])
def test_a_thinking_template_passes_and_its_empty_block_may_not_be_supervised(
    thinking, tmp_path, verdict, monkeypatch
) -> None:
    from support.tiny import write_conversations

    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    target = save_tiny_target(tmp_path / "target", template=THINKING)
    data = write_conversations(tmp_path / "train.jsonl", 3, turns=2)
    recipe = Recipe(
        target=TargetConfig(path=str(target), dtype="float32"),
        data=DataConfig(train=(str(data),), row_length=256, thinking=thinking),
        drafter=DrafterSettings(layers=1, block_size=4),
        run=RunConfig(device="cpu"),
    )
    run = prepare(recipe, say=lambda _: None)
    assert verdict(run, "render-parity") == {}

    def earlier(sample):
        mask = sample.loss_mask.copy()
        first = int(np.flatnonzero(mask)[0])
        mask[first - 4 : first] = True
        return with_mask(sample, mask)

    rerender(monkeypatch, earlier)
    assert set(verdict(run, "render-parity")) == {"render-parity"}


@pytest.mark.parametrize(
    ("token", "cause"),
    [(258, "pad token"), (257, "eos token"), (256, "occurs in the data")],
)
def test_a_mask_token_that_means_something_is_mask_token(token, cause, run, changed, verdict) -> None:
    failed = verdict(changed(run, mask_token_id=token), *ALL)
    assert set(failed) == {"mask-token"}
    assert cause in failed["mask-token"]
    assert "drafter.mask_token_id" in failed["mask-token"]


def test_a_mask_token_without_a_row_is_mask_token(run, verdict, changed) -> None:
    wide = changed(run, mask_token_id=400, vocab_size=500)
    assert "outside the target's 320" in verdict(wide, "mask-token")["mask-token"]


def test_another_mask_token_in_the_blocks_is_mask_token(run, verdict, monkeypatch) -> None:
    """Training with one id and decoding with another learns to predict nothing."""
    genuine = anchors_module.blocks_at
    monkeypatch.setattr(
        anchors_module, "blocks_at", lambda *a, **k: genuine(*a, **{**k, "mask_token_id": k["mask_token_id"] + 1})
    )
    assert set(verdict(run, *ALL)) == {"mask-token"}


def test_a_limit_on_samples_is_not_a_stale_cache(tmp_path, verdict, monkeypatch) -> None:
    """Rows past ``data.max_samples`` are in no packed row, and should not be."""
    from support.tiny import write_conversations

    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    data = write_conversations(tmp_path / "train.jsonl", 40)
    recipe = Recipe(
        target=TargetConfig(path=str(save_tiny_target(tmp_path / "target")), dtype="float32"),
        data=DataConfig(train=(str(data),), row_length=160, max_samples=10),
        drafter=DrafterSettings(layers=1, block_size=4),
        run=RunConfig(device="cpu"),
    )
    assert verdict(prepare(recipe, say=lambda _: None), "render-parity") == {}
