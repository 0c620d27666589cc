"""Export: one proven directory or none. Every part of the proof is broken once, and seen to fail."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import slipstream
from slipstream.config import DrafterSettings, Recipe, TargetConfig
from slipstream.data.pack import tokenizer_digest
from slipstream.drafter.config import DrafterConfig, resolve
from slipstream.drafter.model import DraftModel
from slipstream.drafter.store import load_drafter, save_drafter
from slipstream.errors import ExportError
from slipstream.export import proof as proof_module
from slipstream.export.proof import REQUIRED, check_target, prove, read_config
from slipstream.export.zlab import export_drafter, export_run, proof_ids, run_facts, served_path
from slipstream.recipe import recipe_as_toml
from slipstream.target.model import Target, load_target
from support.tiny import save_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = save_tiny_target(tmp_path_factory.mktemp("target"))
    return load_target(TargetConfig(path=str(directory)), device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def config(target: Target) -> DrafterConfig:
    return resolve(DrafterSettings(layers=2, block_size=8, target_layer_ids=(1, 3, 5)), target.info, 263)


@pytest.fixture(scope="module")
def draft_model(config: DrafterConfig) -> DraftModel:
    model = DraftModel(config)
    model.init_weights(0.1, torch.Generator().manual_seed(3))
    return model


def test_the_directory_holds_what_the_loaders_need_and_nothing_else(
    tmp_path: Path, target: Target, config: DrafterConfig, draft_model: DraftModel
) -> None:
    report = export_drafter(draft_model, config, tmp_path / "out", target=target)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert report.proof.tensors == 11 * 2 + 3
    assert report.proof.dtype == "bfloat16"
    written = read_config(tmp_path / "out")
    assert set(REQUIRED) <= set(written)
    assert "auto_map" not in written
    assert written["block_size"] == written["dflash_config"]["block_size"] == 8
    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    assert written["vocab_size"] == target.info.vocab_rows
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    for name, tensor in draft_model.state_dict().items():
        assert torch.equal(state[name], tensor.to(torch.bfloat16))
    card = (tmp_path / "out" / "README.md").read_text()
    assert target.info.digest in card
    assert '"num_speculative_tokens": 7' in card
    assert "--speculative-num-draft-tokens 8" in card


def test_a_float16_target_gets_float16_weights(
    tmp_path: Path, target: Target, config: DrafterConfig, draft_model: DraftModel
) -> None:
    report = export_drafter(draft_model, config, tmp_path / "out", target=target, dtype=torch.float16)
    assert report.proof.dtype == read_config(tmp_path / "out")["dtype"] == "float16"


def test_sliding_layers_export(tmp_path: Path, target: Target, config: DrafterConfig) -> None:
    sliding = dataclasses.replace(config, layer_types=("sliding_attention", "full_attention"), sliding_window=16)
    report = export_drafter(DraftModel(sliding), sliding, tmp_path / "out", target=target)
    assert any("sliding" in note for note in report.notes)
    assert read_config(tmp_path / "out")["sliding_window"] == 16


def test_an_existing_directory_is_left_as_it_is(
    tmp_path: Path, target: Target, config: DrafterConfig, draft_model: DraftModel
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ExportError, match="exists and is not overwritten"):
        export_drafter(draft_model, config, tmp_path / "out", target=target)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


Tamper = Callable[[Path], None]


def tamper_config(**changes: Any) -> Tamper:
    """Return an edit of config.json: None removes a key, ``dflash_config`` and ``rope_parameters`` are merged."""

    def edit(directory: Path) -> None:
        tree = json.loads((directory / "config.json").read_text())
        for key, value in changes.items():
            if value is None:
                tree.pop(key)
            elif isinstance(value, dict):
                tree[key].update(value)
            else:
                tree[key] = value
        (directory / "config.json").write_text(json.dumps(tree))

    return edit


def tamper_tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Tamper:
    def apply(directory: Path) -> None:
        state = load_file(directory / "model.safetensors")
        edit(state)
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})

    return apply


def flip_one_bit(directory: Path) -> None:
    data = bytearray((directory / "model.safetensors").read_bytes())
    data[-2] ^= 1
    (directory / "model.safetensors").write_bytes(bytes(data))


def cut(directory: Path) -> None:
    data = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(data[: len(data) // 2])


BREAKS: dict[str, tuple[Tamper, str]] = {
    "tensor dropped": (
        tamper_tensors(lambda s: s.pop("layers.1.mlp.up_proj.weight")),
        "lacks layers.1.mlp.up_proj.weight",
    ),
    "head added": (
        tamper_tensors(lambda s: s.update({"lm_head.weight": torch.zeros(320, 64)})),
        "holds lm_head.weight",
    ),
    "embedding added": (
        tamper_tensors(lambda s: s.update({"embed_tokens.weight": torch.zeros(320, 64)})),
        "holds embed_tokens",
    ),
    "rotary buffer added": (
        tamper_tensors(lambda s: s.update({"rotary_emb.inv_freq": torch.zeros(8)})),
        "holds rotary_emb",
    ),
    "prefix": (tamper_tensors(lambda s: s.update({f"model.{k}": s.pop(k) for k in list(s)})), "lacks fc.weight"),
    "shape": (
        tamper_tensors(lambda s: s.update({"norm.weight": torch.ones(65, dtype=torch.bfloat16)})),
        "norm.weight is",
    ),
    "one float32 tensor": (
        tamper_tensors(lambda s: s.update({"norm.weight": torch.ones(64)})),
        "norm.weight is float32",
    ),
    "weight changed": (tamper_tensors(lambda s: s["fc.weight"][0, 0].add_(1.0)), "fc.weight differs from the trained"),
    "bit flipped": (flip_one_bit, "differs from the trained"),
    "file cut": (cut, "does not load|cannot be read"),
    "file gone": (lambda d: (d / "model.safetensors").unlink(), "cannot be read back"),
    "config gone": (lambda d: (d / "config.json").unlink(), "cannot be read back"),
    "config not json": (lambda d: (d / "config.json").write_text("{"), "cannot be read back"),
    "dtype": (tamper_config(dtype="float32"), "dtype 'float32'"),
    "torch_dtype": (tamper_config(torch_dtype="float32"), "torch_dtype 'float32'"),
    "old rope dialect gone": (tamper_config(rope_theta=None), "lacks rope_theta"),
    "new rope dialect gone": (tamper_config(rope_parameters=None), "lacks rope_parameters"),
    "rope dialects differ": (tamper_config(rope_parameters={"rope_theta": 5.0}), "rope_parameters.rope_theta 5.0"),
    "scaled rope": (tamper_config(rope_parameters={"rope_type": "yarn"}), "rope_type 'yarn'"),
    "block size differs": (tamper_config(block_size=16), "block_size 16"),
    "block size not nested": (tamper_config(dflash_config={"block_size": 4}), "dflash_config.block_size 4"),
    "layer types gone": (tamper_config(layer_types=None), "lacks layer_types"),
    "layer types": (tamper_config(layer_types=["full_attention"]), "layer_types"),
    "num_target_layers gone": (tamper_config(num_target_layers=None), "lacks num_target_layers"),
    "ids shifted": (tamper_config(dflash_config={"target_layer_ids": [2, 4, 6]}), r"target_layer_ids \[2, 4, 6\]"),
    "eagle ids not shifted": (
        tamper_config(eagle_aux_hidden_state_layer_ids=[1, 3, 5]),
        "eagle_aux_hidden_state_layer_ids",
    ),
    "mask token": (tamper_config(dflash_config={"mask_token_id": 258}), "mask_token_id 258"),
    "vocabulary": (tamper_config(vocab_size=300), "vocab_size 300"),
    "eps": (tamper_config(rms_norm_eps=1e-5), "rms_norm_eps"),
    "auto_map": (tamper_config(auto_map="x"), "auto_map"),
    "a stray file": (lambda d: (d / "dflash.py").write_text("x"), "holds dflash.py"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_each_part_of_the_proof_can_fail(
    name: str,
    tmp_path: Path,
    target: Target,
    config: DrafterConfig,
    draft_model: DraftModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tamper, message = BREAKS[name]
    genuine = proof_module.prove

    def tampered(directory: Path, **arguments: Any) -> Any:
        tamper(directory)
        return genuine(directory, **arguments)

    monkeypatch.setattr(proof_module, "prove", tampered)
    with pytest.raises(ExportError, match=message) as caught:
        export_drafter(draft_model, config, tmp_path / "out", target=target)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_ids_and_mask_token_must_fit_the_target(target: Target, config: DrafterConfig) -> None:
    def written(nested: dict[str, Any], **changes: Any) -> dict[str, Any]:
        tree = {**config.to_json(), **changes}
        return {**tree, "dflash_config": {**tree["dflash_config"], **nested}}

    check_target(written({}), target)
    for nested, changes, message in (
        ({"target_layer_ids": [1, 3, 7]}, {}, "0..6"),
        ({"target_layer_ids": [-1, 3]}, {}, "0..6"),
        ({"target_layer_ids": [3, 1]}, {}, "increasing"),
        ({"target_layer_ids": []}, {}, "increasing"),
        ({"mask_token_id": 258}, {}, "padding"),
        ({"mask_token_id": 257}, {}, "end token"),
        ({"mask_token_id": 320}, {}, "outside"),
        ({}, {"num_target_layers": 12}, "num_target_layers"),
        ({}, {"vocab_size": 262}, "vocab_size"),
        ({}, {"hidden_size": 32}, "hidden_size"),
    ):
        with pytest.raises(ExportError, match=message):
            check_target(written(nested, **changes), target)


def test_a_loader_that_computes_something_else_is_caught(
    tmp_path: Path, target: Target, config: DrafterConfig, draft_model: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal files, another network: the logits decide."""

    class Wrong(DraftModel):
        def context_kv(self, features: torch.Tensor, positions: torch.Tensor) -> Any:
            return super().context_kv(features, positions + 1)

    def load(*args: Any, **kwargs: Any) -> Any:
        model, read = load_drafter(*args, **kwargs)
        model.__class__ = Wrong
        return model, read

    monkeypatch.setattr(proof_module, "load_drafter", load)
    with pytest.raises(ExportError, match="logits differ by"):
        export_drafter(draft_model, config, tmp_path / "out", target=target)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path, target: Target, config: DrafterConfig) -> None:
    model = DraftModel(config)
    with torch.no_grad():
        model.norm.weight[0] = float("inf")
    with pytest.raises(ExportError, match="not finite"):
        export_drafter(model, config, tmp_path / "out", target=target)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, target: Target, config: DrafterConfig, draft_model: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ExportError, match="No space left"):
        export_drafter(draft_model, config, tmp_path / "out", target=target)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setattr("slipstream.provenance.write_atomically", full)
    with pytest.raises(ExportError, match="No space left"):
        export_drafter(draft_model, config, tmp_path / "out", target=target)
    assert list(tmp_path.iterdir()) == []


def test_a_kill_before_the_rename_leaves_no_directory(
    tmp_path: Path, target: Target, config: DrafterConfig, draft_model: DraftModel
) -> None:
    """A killed process cannot clean up: the name must not exist all the same."""
    import subprocess
    import sys

    save_drafter(draft_model, config, tmp_path / "source", dtype=torch.float32)
    code = (
        "import os, sys, torch\n"
        "from pathlib import Path\n"
        "from slipstream.config import TargetConfig\n"
        "from slipstream.drafter.store import load_drafter\n"
        "from slipstream.target.model import load_target\n"
        "import slipstream.export.proof as proof\n"
        "from slipstream.export.zlab import export_drafter\n"
        "real = proof.prove\n"
        "def prove(*a, **k):\n"
        "    real(*a, **k)\n"
        "    os.kill(os.getpid(), 9)\n"
        "proof.prove = prove\n"
        "model, config = load_drafter(sys.argv[1])\n"
        "target = load_target(TargetConfig(path=sys.argv[2]), device=torch.device('cpu'), dtype=torch.float32)\n"
        "export_drafter(model, config, Path(sys.argv[3]), target=target)\n"
    )
    arguments = [str(tmp_path / "source"), target.info.name, str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(slipstream.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "out").exists()
    export_drafter(draft_model, config, tmp_path / "out", target=target)
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_link_under_the_name_counts_as_existing(
    tmp_path: Path, target: Target, config: DrafterConfig, draft_model: DraftModel
) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ExportError, match="exists"):
        export_drafter(draft_model, config, tmp_path / "out", target=target)


def make_run(directory: Path, target: Target, config: DrafterConfig, model: DraftModel, **facts: Any) -> Path:
    directory.mkdir()
    recipe = Recipe(target=TargetConfig(path=target.info.name, dtype="float32"))
    (directory / "recipe.toml").write_text(recipe_as_toml(recipe))
    (directory / "run.json").write_text(json.dumps({"run_id": "r1", **facts}))
    save_drafter(model, config, directory / "drafter", dtype=torch.float32)
    return directory


def test_a_run_is_exported_with_its_figures(
    tmp_path: Path, target: Target, config: DrafterConfig, draft_model: DraftModel, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    run = make_run(tmp_path / "run", target, config, draft_model)
    (run / "evaluation.json").write_text(json.dumps({"tau": 2.5, "prompts": 3, "temperature": 0.0, "block_size": 8}))
    assert export_run(run, tmp_path / "out", dry_run=True, console=Console()) is None
    assert not (tmp_path / "out").exists()
    report = export_run(run, tmp_path / "out", console=Console(width=400))
    assert report is not None
    printed = capsys.readouterr().out
    assert report.commands.vllm in printed
    assert report.commands.sglang in printed
    card = (tmp_path / "out" / "README.md").read_text()
    assert "2.500 tokens" in card
    assert "r1" in card


def test_a_hybrid_target_is_served_with_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    directory = save_tiny_target(tmp_path / "target", "qwen3_5")
    hybrid = load_target(TargetConfig(path=str(directory)), device=torch.device("cpu"), dtype=torch.float32)
    config = resolve(DrafterSettings(layers=1, block_size=8, target_layer_ids=(1, 3)), hybrid.info, 263)
    run = make_run(tmp_path / "run", hybrid, config, DraftModel(config))
    for dry_run in (True, False):
        export_run(run, tmp_path / "out", dry_run=dry_run, console=Console(width=400))
        (line,) = [x for x in capsys.readouterr().out.splitlines() if "sglang.launch_server" in x]
        assert line.endswith("--mamba-scheduler-strategy extra_buffer")
    assert "--mamba-scheduler-strategy extra_buffer" in (tmp_path / "out" / "README.md").read_text()


def test_not_a_run_an_unfinished_run_and_an_existing_name_are_refused(
    tmp_path: Path, target: Target, config: DrafterConfig, draft_model: DraftModel
) -> None:
    with pytest.raises(ExportError, match="not a run directory"):
        export_run(tmp_path / "nothing", tmp_path / "out")
    run = make_run(tmp_path / "run", target, config, draft_model)
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match="exists"):
        export_run(run, tmp_path / "out")
    os.rename(run / "drafter", tmp_path / "elsewhere")
    with pytest.raises(ExportError, match="train it first"):
        export_run(run, tmp_path / "new")


def test_another_target_than_the_trained_one_is_refused(
    tmp_path: Path, target: Target, config: DrafterConfig, draft_model: DraftModel
) -> None:
    with pytest.raises(ExportError, match=r"trained for target .*--target.path"):
        export_drafter(draft_model, config, tmp_path / "out", target=target, run={"target_digest": "0" * 64})
    assert list(tmp_path.iterdir()) == []


def test_the_proof_needs_no_training_data(target: Target) -> None:
    ids = proof_ids(target)
    assert 2 <= len(ids) <= 128
    assert max(ids) < target.info.vocab_rows


def test_proving_twice_gives_the_same(
    tmp_path: Path, target: Target, config: DrafterConfig, draft_model: DraftModel
) -> None:
    export_drafter(draft_model, config, tmp_path / "out", target=target)
    state = draft_model.state_dict()
    arguments: dict[str, Any] = {
        "state": state,
        "config": config,
        "target": target,
        "dtype": torch.bfloat16,
        "ids": proof_ids(target),
    }
    assert prove(tmp_path / "out", **arguments) == prove(tmp_path / "out", **arguments)


def test_a_server_is_given_a_directory_that_it_can_load(tmp_path: Path, target: Target) -> None:
    assert served_path(target.info.name, target) == target.info.name
    assert served_path("owner/name", target) == "owner/name"
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert served_path(str(tmp_path / "model.gguf"), target) == target.info.name  # where the weights were loaded from


@pytest.mark.parametrize("differs", ["target.digest", "tokenizer.digest"])
def test_a_run_without_checkpoints_still_knows_its_target(
    differs: str, tmp_path: Path, target: Target, config: DrafterConfig, draft_model: DraftModel
) -> None:
    """Once checkpoints/ is removed, run.json tells."""
    known = {"target.digest": target.info.digest, "tokenizer.digest": tokenizer_digest(target.tokenizer)}
    run = make_run(tmp_path / "run", target, config, draft_model, identity=known)
    assert run_facts(run, run / "drafter")["target_digest"] == target.info.digest
    export_run(run, tmp_path / "same")
    (run / "run.json").write_text(json.dumps({"run_id": "r1", "identity": {**known, differs: "0" * 64}}))
    with pytest.raises(ExportError, match=r"trained .*--target\.path") as caught:
        export_run(run, tmp_path / "other")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "other").exists()


def test_a_digest_that_is_none_is_refused(
    tmp_path: Path, target: Target, config: DrafterConfig, draft_model: DraftModel
) -> None:
    run = make_run(tmp_path / "run", target, config, draft_model, identity={"target.digest": 5})
    with pytest.raises(ExportError, match=r"run\.json.*target\.digest is 5"):
        export_run(run, tmp_path / "out")


def test_figures_of_other_weights_are_not_given(
    tmp_path: Path, target: Target, config: DrafterConfig, draft_model: DraftModel
) -> None:
    from slipstream.drafter.store import weights_digest

    run = make_run(tmp_path / "run", target, config, draft_model)
    for digest, given in ((weights_digest(run / "drafter"), True), ("0" * 64, False)):
        (run / "evaluation.json").write_text(json.dumps({"tau": 2.5, "prompts": 3, "drafter_digest": digest}))
        report = export_run(run, tmp_path / f"out-{given}")
        assert report is not None
        assert ("2.500 tokens" in (tmp_path / f"out-{given}" / "README.md").read_text()) is given
        assert any("measured other weights" in note for note in report.notes) is not given


@pytest.mark.parametrize("evaluation", [{"a": 1}, {"tau": "2.5"}, {"tau": True}, {"tau": None}])
def test_figures_without_a_tau_are_left_out_and_said(
    evaluation: dict[str, Any], tmp_path: Path, target: Target, config: DrafterConfig, draft_model: DraftModel
) -> None:
    run = make_run(tmp_path / "run", target, config, draft_model)
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    report = export_run(run, tmp_path / "out")
    assert report is not None
    assert any("evaluation.json has no number tau" in note for note in report.notes)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "not measured" in card
    assert "tokens for each target pass" not in card


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud800"])
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_name_that_no_file_can_have_is_one_line(
    name: str, dry_run: bool, tmp_path: Path, target: Target, config: DrafterConfig, draft_model: DraftModel
) -> None:
    run = make_run(tmp_path / "run", target, config, draft_model)
    with pytest.raises(ExportError, match="give another name with --to") as caught:
        export_run(run, tmp_path / name, dry_run=dry_run)
    assert str(caught.value).isprintable()
    with pytest.raises(ExportError, match="give another name with --to"):
        export_run(run, tmp_path / name / "inner", dry_run=dry_run)
