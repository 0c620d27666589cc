"""Training from a recipe to a run directory: what is written, what is refused, and how it stops."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from slipstream.drafter.store import load_drafter
from slipstream.errors import CheckpointError, DataError, DecodingError, DrafterError, TrainingError
from slipstream.recipe import load_recipe
from slipstream.training import checkpoint, loop
from slipstream.training.plan import plan
from slipstream.training.trainer import train
from support.tiny import write_conversations
from support.tiny_run import lines, make_inputs, quiet_train, tiny_recipe


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("train"))


def test_a_run_leaves_everything_that_it_promises(root: Path, tmp_path: Path):
    run = tmp_path / "runs" / "one"
    settings: dict[str, Any] = {
        "training__steps": 5,
        "training__log_every": 2,
        "training__evaluate_every": 2,
        "training__checkpoint_every": 1,
        "training__keep_checkpoints": 2,
    }
    recipe = tiny_recipe(root, run, data__heldout=root / "heldout.jsonl", **settings)
    summary, output = quiet_train(recipe, argv=["slipstream", "train"])
    assert {"run.json", "recipe.toml", "metrics.jsonl", "tensorboard", "checkpoints", "drafter"} <= set(os.listdir(run))
    assert load_recipe(run / "recipe.toml") == recipe
    record = json.loads((run / "run.json").read_text())
    assert record["argv"] == ["slipstream", "train"]
    assert sorted(os.listdir(run / "checkpoints")) == ["step-4", "step-5"]
    assert [row["step"] for row in lines(run)] == [2, 4, 5]
    assert [row["step"] for row in lines(run, "evaluation")] == [2, 4, 5]
    for row in lines(run):
        assert row["run"] == record["run_id"]
        assert row["teacher_forced_acceptance_length"] >= 1
        assert row["loss"] > 0
        assert row["grad_norm"] > 0
        assert row["tokens_per_second"] > 0
        assert 0 < row["target_share_of_time"] < 1
        assert row["anchors_per_step"] == 24
        assert len(row["teacher_forced_accuracy_by_slot"]) == 7
    for row in lines(run, "evaluation"):
        assert row["decoded_acceptance_length"] >= 1
        assert row["lossless_equal"] == row["lossless_responses"] == 2
    # Plain lines, since this console is no terminal: figures, a rate and an estimate.
    assert "step 2/5  loss " in output
    assert "tf-acceptance" in output
    assert "tok/s  left 0:" in output
    assert summary.steps == 5
    assert summary.metrics["step"] == 5
    assert summary.evaluation is not None
    draft_model, config = load_drafter(summary.drafter)
    assert config.block_size == 8
    last = load_file(run / "checkpoints/step-5/drafter/model.safetensors")
    for name, value in draft_model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, last[name])
    assert any("tfevents" in name for name in os.listdir(run / "tensorboard"))
    assert not [p for p in run.rglob("*") if ".tmp" in p.name or p.name.startswith(".writing")]


def test_the_norms_move_and_the_loss_falls(root: Path, tmp_path: Path):
    summary, _ = quiet_train(tiny_recipe(root, tmp_path / "run", training__steps=25, training__learning_rate=0.003))
    losses = [row["loss"] for row in lines(summary.directory)]
    assert losses[-1] < losses[0] - 0.3
    draft_model, _ = load_drafter(summary.drafter)
    for name, parameter in draft_model.named_parameters():
        if "norm" in name:
            assert not torch.equal(parameter, torch.ones_like(parameter)), f"{name} never moved"


def test_the_same_recipe_gives_the_same_weights(root: Path, tmp_path: Path):
    one, _ = quiet_train(tiny_recipe(root, tmp_path / "a"))
    two, _ = quiet_train(tiny_recipe(root, tmp_path / "b"))
    other, _ = quiet_train(tiny_recipe(root, tmp_path / "c", run__seed=1))
    a, b, c = (load_file(s.drafter / "model.safetensors") for s in (one, two, other))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert any(not torch.equal(a[k], c[k]) for k in a)


def test_an_existing_run_directory_is_never_touched(root: Path, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "precious").write_text("mine")
    with pytest.raises(TrainingError, match=r"run exists and is not overwritten; continue it with --resume, or choose"):
        quiet_train(tiny_recipe(root, run))
    assert os.listdir(run) == ["precious"]
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(TrainingError, match="exists and is not overwritten"):
        quiet_train(tiny_recipe(root, file))
    (tmp_path / "empty").mkdir()
    quiet_train(tiny_recipe(root, tmp_path / "empty", training__steps=1))


def test_a_mistake_in_the_data_leaves_no_run_directory(root: Path, tmp_path: Path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(DataError):
        quiet_train(tiny_recipe(root, tmp_path / "run", data__train=empty))
    assert not (tmp_path / "run").exists()


def test_an_evaluation_that_fails_costs_neither_the_run_nor_the_drafter(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise DecodingError("all responses ended with their first token")

    monkeypatch.setattr("slipstream.training.loop.decoded_acceptance", fail)
    summary, _ = quiet_train(
        tiny_recipe(root, tmp_path / "run", data__heldout=root / "heldout.jsonl", training__evaluate_prompts=2)
    )
    assert (summary.drafter / "model.safetensors").is_file()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    assert "all responses ended" in lines


def test_lossy_decoding_is_said_and_ends_with_an_error_after_the_drafter_is_written(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from slipstream.training import loop

    genuine = loop.decoded_acceptance
    monkeypatch.setattr(loop, "decoded_acceptance", lambda *a: {**genuine(*a), "lossless_equal": 1, "lossy": 1})
    told = io.StringIO()
    recipe = tiny_recipe(root, tmp_path / "run", data__heldout=root / "heldout.jsonl", training__evaluate_prompts=2)
    with pytest.raises(DecodingError, match="training is complete, but decoding is not lossless"):
        train(recipe, console=Console(file=told, width=300))
    assert "NOT lossless on 1 of 2" in told.getvalue()
    assert (tmp_path / "run" / "drafter" / "model.safetensors").is_file()


def test_heldout_prompts_that_are_trained_on_are_told(root: Path, tmp_path: Path):
    recipe = tiny_recipe(root, tmp_path / "run", data__heldout=root / "train.jsonl", training__evaluate_prompts=2)
    assert "held-out prompts (number 0, 1" in quiet_train(recipe)[1]


def test_evaluation_without_prompts_is_refused_at_the_start(root: Path, tmp_path: Path):
    with pytest.raises(TrainingError, match=r"training\.evaluate_every is 2, but there are no held-out prompts"):
        quiet_train(tiny_recipe(root, tmp_path / "run", training__evaluate_every=2))
    assert not (tmp_path / "run").exists()


def test_preflight_sees_the_prepared_run_and_can_stop_it(root: Path, tmp_path: Path):
    def check(run: Any) -> dict[str, Any]:
        assert not (tmp_path / "run").exists()
        return {"block": run.config.block_size}

    quiet_train(tiny_recipe(root, tmp_path / "run", training__steps=1), preflight=check)
    assert json.loads((tmp_path / "run" / "preflight.json").read_text()) == {"block": 8}

    def refuse(_: Any) -> dict[str, Any]:
        raise TrainingError("no")

    with pytest.raises(TrainingError, match="no"):
        quiet_train(tiny_recipe(root, tmp_path / "other"), preflight=refuse)
    assert not (tmp_path / "other").exists()


def test_minutes_end_a_run_and_shape_its_schedule(root: Path, tmp_path: Path):
    recipe = tiny_recipe(
        root, tmp_path / "run", training__steps=0, training__epochs=0, training__max_minutes=0.02, training__log_every=1
    )
    summary, output = quiet_train(recipe)
    rates = [row["learning_rate"] for row in lines(summary.directory)]
    assert summary.steps >= 3
    assert summary.elapsed <= 0.02 * 60 + 1
    assert rates[-1] < max(rates), "the rate falls towards the end of the time"
    assert "of the time limit)" in output


def test_warm_start_begins_from_those_weights_and_refuses_another_shape(root: Path, tmp_path: Path):
    first, _ = quiet_train(tiny_recipe(root, tmp_path / "a", training__steps=12, training__learning_rate=0.003))
    second, _ = quiet_train(
        tiny_recipe(root, tmp_path / "b", drafter__warm_start=first.drafter, training__learning_rate=1e-9)
    )
    a, b = (load_file(s.drafter / "model.safetensors") for s in (first, second))
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, atol=1e-6, rtol=0)
    with pytest.raises(DrafterError, match=r"has layers = 2, this recipe has 1; set drafter\.layers"):
        quiet_train(tiny_recipe(root, tmp_path / "c", drafter__warm_start=first.drafter, drafter__layers=1))


@pytest.mark.parametrize("options", [{}, {"training__optimizer": "muon", "training__labels": "soft"}])
def test_a_loss_that_is_not_finite_stops_with_the_batch_and_state_saved(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
):
    real = loop.training_step

    def poisoned(draft_model: Any, embed: Any, head_weight: Any, features: Any, *args: Any, **kwargs: Any) -> Any:
        if features.batch.index == 5:
            features.features[0, 3, 0] = float("nan")
        return real(draft_model, embed, head_weight, features, *args, **kwargs)

    monkeypatch.setattr(loop, "training_step", poisoned)
    monkeypatch.setattr("slipstream.training.fault.training_step", poisoned)
    run = tmp_path / "run"
    steps = {"training__steps": 6, "training__accumulation": 2, "training__checkpoint_every": 1}
    recipe = tiny_recipe(root, run, **steps, training__log_every=1, **options)
    with pytest.raises(TrainingError) as caught:
        quiet_train(recipe)
    message = str(caught.value)
    place = run / "not-finite-step-3"
    assert f"lower training.{'muon_' if options else ''}learning_rate" in message
    assert "step 3: the loss of micro-batch 5 is not finite" in message
    assert str(place) in message
    assert "\n" not in message
    batches = load_file(place / "batches.safetensors")
    assert {"4.ids", "5.ids", "5.loss_mask", "5.draw0.anchors"} <= batches.keys()
    # The saved weights are those that met the batch: the ones after step 2, as the checkpoint of step 2 has them.
    for file in ("drafter/model.safetensors", "optimizer.safetensors"):
        saved, before = load_file(place / file), load_file(run / "checkpoints/step-2" / file)
        assert all(torch.equal(saved[k], before[k]) for k in before)
    assert checkpoint.latest_checkpoint(run / "checkpoints") == run / "checkpoints/step-2"
    assert [row["step"] for row in lines(run)] == [1, 2]
    assert not (run / "drafter").exists()


def test_a_full_disk_during_a_checkpoint_is_one_line_and_keeps_the_older_one(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = checkpoint.save_file

    def full(tensors: Any, path: Path, **options: Any) -> None:
        if "step-4" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(tensors, path, **options)

    monkeypatch.setattr(checkpoint, "save_file", full)
    run = tmp_path / "run"
    with pytest.raises(CheckpointError, match="step-4 cannot be written: No space left on device; older") as caught:
        quiet_train(tiny_recipe(root, run, training__steps=6, training__checkpoint_every=2))
    assert "\n" not in str(caught.value)
    assert os.listdir(run / "checkpoints") == ["step-2"]
    monkeypatch.undo()
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    summary, _ = quiet_train(tiny_recipe(root, run, training__steps=6, training__checkpoint_every=2), resume=True)
    assert [row["step"] for row in lines(run)] == [1, 2, 3, 4, 5, 6]
    assert summary.steps == 6


def test_rows_without_any_anchor_do_not_break_a_step(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One micro-batch of two is empty, and then a whole step is."""
    from slipstream.data.pack import PackedDataset

    real = PackedDataset.batch

    def batch(self: Any, index: int, rows: int, seed: int) -> Any:
        found = real(self, index, rows, seed)
        if index in (1, 4, 5):
            found.loss_mask.zero_()
        return found

    monkeypatch.setattr(PackedDataset, "batch", batch)
    summary, _ = quiet_train(tiny_recipe(root, tmp_path / "run", training__accumulation=2))
    rows = lines(summary.directory)
    assert [row["empty_steps"] for row in rows] == [0, 0, 1, 0]
    assert rows[2]["loss"] is None
    assert rows[2]["teacher_forced_acceptance_length"] is None
    assert rows[0]["anchors_per_step"] == 24
    assert rows[3]["loss"] > 0


def test_the_plan_names_what_train_would_do(root: Path, tmp_path: Path):
    recipe = tiny_recipe(root, tmp_path / "run", training__steps=0, training__epochs=2.0, training__rows=2)
    shown = plan(recipe)
    assert not (tmp_path / "run").exists()
    assert shown["device"] in ("cpu", "cuda:0")
    assert shown["target layers read"] == [1, 2, 3, 4, 5]
    assert shown["mask token"].startswith("262 ")
    summary, output = quiet_train(recipe)
    assert shown["steps"] == str(summary.steps)
    parameters = sum(p.numel() for p in load_drafter(summary.drafter)[0].parameters())
    assert shown["drafter parameters"] == f"{parameters:,}"
    assert "mask token 262" in output
    assert shown["memory: together"].endswith("(estimate)")
    assert "exists" in plan(recipe)["run directory"]


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "llama", "qwen3_moe"])
def test_the_plan_reads_every_family_without_its_weights(root: Path, tmp_path: Path, family: str):
    from slipstream.target.description import describe_target
    from slipstream.target.model import load_target
    from support.tiny import save_tiny_target

    recipe = tiny_recipe(root, tmp_path / "run", target__path=save_tiny_target(tmp_path / "t", family))
    info, _, parameters = describe_target(recipe.target)
    target = load_target(recipe.target, device=torch.device("cpu"))
    for name in ("digest", "eos_ids", "hidden_size", "num_layers", "vocab_rows", "rope_theta", "intermediate_size"):
        assert getattr(info, name) == getattr(target.info, name), name
    assert parameters == sum(p.numel() for p in target.model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drafter__target_layer_ids": 7}, "7"),
        ({"drafter__mask_token_id": 258}, "padding"),
        ({"drafter__mask_token_id": 257}, "end"),
        ({"drafter__mask_token_id": 999}, "outside"),
        ({"data__row_length": 6}, "row"),
    ],
)
def test_bad_settings_stop_before_anything_is_written(root: Path, tmp_path: Path, change: dict, message: str):
    from slipstream.errors import SlipstreamError

    for start in (quiet_train, plan):
        with pytest.raises(SlipstreamError, match=message) as caught:
            start(tiny_recipe(root, tmp_path / "run", **change))
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()


def test_conversations_of_another_run_can_be_read_from_the_cache(root: Path, tmp_path: Path):
    """The plan and the run pack the data once: they use the same cache key."""
    other = write_conversations(tmp_path / "other.jsonl", 6)
    recipe = tiny_recipe(root, tmp_path / "run", data__train=other, training__steps=1)
    cache = Path(os.environ["SLIPSTREAM_CACHE"]) / "packed"
    before = set(cache.glob("*.safetensors")) if cache.exists() else set()
    plan(recipe)
    middle = set(cache.glob("*.safetensors"))
    quiet_train(recipe)
    assert len(middle - before) == 1
    assert set(cache.glob("*.safetensors")) == middle
