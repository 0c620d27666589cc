"""``slipstream plan``: its output, its exit codes, and the recipes that come with the project."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli import main
from support.shapes import save_shape
from support.tiny import save_tiny_target
from support.tiny_run import overrides

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("plan")
    save_tiny_target(where / "target")
    (where / "r.toml").write_text("[training]\naccumulation = 4\n", encoding="utf-8")
    return where


def plan(root: Path, *arguments: str) -> int:
    return main(["plan", str(root / "r.toml"), *overrides(root, root / "run"), *arguments])


def test_it_prints_who_owns_what_and_the_memory(root: Path, capsys: pytest.CaptureFixture[str]):
    assert plan(root, "--gpus", "4", "--gpu-memory", "80", "--machines", "2") == 0
    out = capsys.readouterr().out
    assert "2 machines, 4 ranks, 4 target replicas; a step is 4 micro-batches of 1 row" in out
    assert "chosen for 4 GPUs: half of them for targets" in out
    assert "1        3     cuda:3   1: 3           3 on cuda:1" in out
    assert "memory, estimated, on each machine" in out
    for part in ("target weights", "drafter weights, gradients, moments", "activations", "features", "logits"):
        assert f"    {part} " in out
    assert "80.00 GiB free" in out
    assert not (root / "run").exists()


def test_settings_name_other_devices(root: Path, capsys: pytest.CaptureFixture[str]):
    devices = ("--topology.targets", "cuda:0", "cuda:1+cuda:2", "--topology.drafters", "cuda:3")
    assert plan(root, "--gpus", "4", *devices) == 0
    out = capsys.readouterr().out
    assert "0 on cuda:0, 1 on cuda:1+cuda:2" in out
    assert "as topology.targets and topology.drafters name them" in out
    assert "free: not known" in out


def test_json_is_one_object(root: Path, capsys: pytest.CaptureFixture[str]):
    assert plan(root, "--gpus", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"][0]["device"] == "cuda:1"
    assert found["ranks"][0]["micro_batches"] == [0, 1, 2, 3]
    assert found["memory"][0]["free"] is None


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_what_cannot_fit_is_exit_code_2_in_one_line_after_the_plan(
    root: Path, more: list[str], capsys: pytest.CaptureFixture[str]
):
    assert plan(root, "--gpus", "2", "--gpu-memory", "0.25", *more) == 2
    shown = capsys.readouterr()
    assert "cuda:1" in shown.out
    assert shown.err.startswith("slipstream: cuda:0 needs about 0.5 GiB and has 0.2 GiB free; most is ")
    assert "(and 1 more device)" in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    if more:
        assert len(json.loads(shown.out)["refusals"]) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--machines", "0"], "--machines is 0; it must be at least 1"),
        (["--machines", "two"], "--machines"),
        (["--gpus", "-1"], "--gpus is -1; it must be at least 0"),
        (["--gpus", "99999"], "at most 1024"),
        (["--gpus", "2", "--gpu-memory", "0"], "--gpu-memory is 0; give the GiB of one GPU, above 0"),
        (["--gpus", "2", "--gpu-memory", "nan"], "--gpu-memory is nan"),
        (["--gpus", "2", "--gpu-memory", "inf"], "--gpu-memory is inf"),
        (["--gpu-memry", "2"], "Did you mean --gpu-memory?"),
        (["--measure"], "unknown option --measure"),
        (["--topology.target", "cuda:0"], "Did you mean topology.targets?"),
        (["--gpus", "2", "--topology.targets", "cuda:2"], "topology.targets holds cuda:2, but there are 2 GPUs"),
        (["--gpus", "2", "--topology.drafters", "cuda:0", "cuda:0"], "topology.drafters names cuda:0 twice"),
        (["--gpus", "0", "--machines", "5"], "each of 5 ranks (1 on each of 5 machines) needs a micro-batch"),
        (["--gpus", "1", "--drafter.warm_start", "gone"], "drafter.warm_start is gone"),
        (["--gpus", "1", "--target.path", ""], "target.path is empty"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    root: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert plan(root, *arguments) == 2
    shown = capsys.readouterr()
    assert says in shown.err
    assert shown.err.startswith("slipstream: ")
    assert len(shown.err.strip().splitlines()) == 1
    assert shown.out == ""


@pytest.mark.parametrize(
    ("name", "gpus", "size"),
    [
        ("embedded", 1, 16),
        ("embedded", 2, 16),
        ("smollm2", 1, 16),
        ("minimal", 1, 16),
        ("minimal", 8, 80),
        ("qwen3-8b", 1, 80),
        ("qwen3-8b", 8, 80),
        ("llama-3.1-8b", 1, 80),
        ("llama-3.1-8b", 5, 48),
        ("qwen3.6-27b", 1, 139),
        ("qwen3.6-27b", 2, 80),
        ("qwen3.6-27b", 6, 64),
    ],
)
def test_the_recipes_fit(
    name: str, gpus: int, size: int, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    if name in ("qwen3-8b", "llama-3.1-8b", "qwen3.6-27b"):
        target = ["--target.path", str(save_shape(tmp_path / name, name))]
    else:  # a recipe's own target where it is shipped as files
        target = {"embedded": []}.get(name, ["--target.path", str(root / "target"), "--drafter.target_layer_ids", "1"])
    asked = ["--gpus", str(gpus), "--gpu-memory", str(size)]
    assert main(["plan", str(RECIPES / f"{name}.toml"), *asked, *target]) == 0, capsys.readouterr().err
    assert "warning" not in capsys.readouterr().out


def test_every_recipe_is_tried():
    tried = test_the_recipes_fit.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {name for name, *_ in tried} == {path.stem for path in RECIPES.glob("*.toml")}
