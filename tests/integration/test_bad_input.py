"""Bad input, a case for each kind: exit code 2, one line on stderr that names value and cure, and nothing lost."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from support.tiny import save_tiny_target, tiny_tokenizer, write_conversations

Run = Callable[..., str]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("targets") / "target")


@pytest.fixture
def recipe(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe that trains two steps in a second or two."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    data = write_conversations(tmp_path / "train.jsonl", 6)
    path = tmp_path / "recipe.toml"
    path.write_text(
        f"""
[run]
directory = "{tmp_path / "run"}"
device = "cpu"
[target]
path = "{target}"
dtype = "float32"
[data]
train = ["{data}"]
row_length = 160
[drafter]
layers = 1
block_size = 4
[training]
steps = 2
checkpoint_every = 1
anchors = 8
precision = "float32"
"""
    )
    return path


@pytest.fixture
def refuses(recipe: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return ``refuses(command, *arguments, names=...) -> message``, which also sees that no run directory is made."""

    def run(command: str, *arguments: str, names: tuple[str, ...], made: bool = False) -> str:
        capfd.readouterr()
        code = main([command, str(recipe), *arguments])
        message = capfd.readouterr().err
        assert code == 2, message
        lines = message.splitlines()
        assert len(lines) == 1, message
        assert lines[0].startswith("slipstream: ")
        assert "Traceback" not in message
        for name in names:
            assert name in message, f"{name!r} is not in: {message}"
        assert (recipe.parent / "run").exists() == made
        return lines[0]

    return run


def rows(*messages: Any) -> str:
    return "".join(json.dumps(m) + "\n" for m in messages)


CHAT = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes, hello there."}]}


def files(directory: Path) -> dict[str, str]:
    """Return a digest of each file, the lock apart."""
    found = (p for p in sorted(directory.rglob("*")) if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


# -- data


@pytest.mark.parametrize("command", ["prepare", "train", "preflight"])
def test_a_missing_file(command, refuses, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.jsonl")
    refuses(command, "--data.train", gone, names=(gone, "does not exist"))


@pytest.mark.parametrize("command", ["prepare", "train", "preflight"])
@pytest.mark.parametrize("name", ["empty.jsonl", "empty.jsonl.gz"])
def test_an_empty_file(command, name, refuses, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    refuses(command, "--data.train", str(path), names=(str(path), "empty"))


BAD_ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "malformed JSON in line 7": (rows(*[CHAT] * 6) + '{"messages": [\n', (":7", "JSON")),
    "no messages": (rows(CHAT, {"id": 4}), (":2", "no messages", "id")),
    "an empty list of messages": (rows({"messages": []}), (":1", "empty")),
    "unknown role": (
        rows({"messages": [{"role": "asistant", "content": "x"}]}),
        (":1", "'asistant'", "Did you mean assistant?"),
    ),
    "an empty answer": (
        rows({"messages": [CHAT["messages"][0], {"role": "assistant", "content": "  "}]}),
        (":1", "empty answer", "--regenerate"),
    ),
    "no supervised token anywhere": (rows({"messages": CHAT["messages"][:1]}), ("no supervised token", "--regenerate")),
}


@pytest.mark.parametrize("command", ["prepare", "train", "preflight"])
@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows(command, case, refuses, tmp_path: Path) -> None:
    text, names = BAD_ROWS[case]
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    refuses(command, "--data.train", str(path), names=names)


@pytest.mark.parametrize("command", ["prepare", "train", "preflight"])
def test_a_prompt_longer_than_the_row(command, refuses, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(rows({"messages": [{"role": "user", "content": "a" * 500}, CHAT["messages"][1]]}))
    refuses(command, "--data.train", str(path), names=("160", "data.row_length"))
    refuses(command, "--data.train", str(path), "--data.over_long", "drop", names=("160", "data.row_length"))


@pytest.mark.parametrize("command", ["prepare", "train", "preflight"])
def test_a_tokenizer_without_chat_template(command, refuses, tmp_path: Path, target: Path) -> None:
    other = tmp_path / "target"
    shutil.copytree(target, other)
    (other / "chat_template.jinja").unlink()
    refuses(command, "--target.path", str(other), names=("no chat template", "instruct"))


# -- target


@pytest.mark.parametrize("command", ["train", "preflight"])
def test_a_target_that_is_not_a_causal_language_model(command, refuses, tmp_path: Path, target: Path) -> None:
    import transformers

    encoder = tmp_path / "encoder"
    config = transformers.BertConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertModel(config).save_pretrained(encoder)
    tiny_tokenizer().save_pretrained(encoder)
    refuses(command, "--target.path", str(encoder), names=("BertModel", "not a causal language model"))
    refuses(command, "--target.path", str(tmp_path / "nowhere"), names=("nowhere", "does not exist"))
    (tmp_path / "hollow").mkdir()
    refuses(command, "--target.path", str(tmp_path / "hollow"), names=("hollow", "config.json"))


@pytest.mark.parametrize("command", ["train", "preflight"])
@pytest.mark.parametrize(("ids", "bad"), [(("1", "7"), "7"), (("1", "8"), "8"), (("-1", "3"), "-1"), (("3", "1"), "3")])
def test_layer_ids_out_of_range_or_at_the_last_layer(command, ids, bad, refuses) -> None:
    refuses(command, "--drafter.target_layer_ids", *ids, names=(bad, "6"))


@pytest.mark.parametrize("command", ["train", "preflight"])
@pytest.mark.parametrize(
    ("token", "cause"),
    [("258", "padding"), ("257", "end-of-sequence"), ("256", "occurs in the training data"), ("320", "outside")],
)
def test_a_mask_token_that_cannot_be_one(command, token, cause, refuses) -> None:
    refuses(command, "--drafter.mask_token_id", token, names=(token, cause, "drafter.mask_token_id"))


# -- recipe


@pytest.mark.parametrize("command", ["prepare", "train", "preflight"])
def test_block_size_one(command, refuses) -> None:
    refuses(command, "--drafter.block_size", "1", names=("drafter.block_size is 1", "2 or more"))


@pytest.mark.parametrize("command", ["prepare", "train", "preflight"])
def test_a_recipe_with_a_typo(command, refuses, recipe: Path) -> None:
    refuses(command, "--drafter.blok_size", "4", names=("blok_size", "Did you mean drafter.block_size?"))
    recipe.write_text(recipe.read_text().replace("block_size", "blocksize"))
    refuses(command, names=("drafter.blocksize", "Did you mean drafter.block_size?"))
    recipe.write_text("[drafter\n")
    refuses(command, names=("recipe.toml", "not valid TOML"))
    recipe.unlink()
    refuses(command, names=("recipe.toml", "does not exist"))


# -- a run's files


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """A finished two-step run, to be copied."""
    room = tmp_path_factory.mktemp("trained")
    data = write_conversations(room / "train.jsonl", 6)
    arguments = {
        "run.directory": room / "run", "run.device": "cpu", "target.path": target, "target.dtype": "float32",
        "data.row_length": 160, "drafter.layers": 1, "drafter.block_size": 4, "training.steps": 2,
        "training.checkpoint_every": 1, "training.anchors": 8, "training.precision": "float32",
    }  # fmt: skip
    (room / "recipe.toml").write_text(f'[data]\ntrain = ["{data}"]\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_CACHE", str(room / "cache"))
        words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        assert main(["train", str(room / "recipe.toml"), *words]) == 0
    return room / "run"


@pytest.fixture
def run_directory(trained: Path, recipe: Path) -> Path:
    """The finished run where ``recipe`` says, with the data that it was trained on."""
    shutil.copytree(trained, recipe.parent / "run")
    return recipe.parent / "run"


def test_an_existing_run_directory_is_not_overwritten(refuses, run_directory: Path) -> None:
    before = files(run_directory)
    refuses("train", names=(str(run_directory), "--resume", "--run.directory"), made=True)
    assert files(run_directory) == before


def test_a_directory_that_is_no_run_is_not_overwritten_either(refuses, recipe: Path) -> None:
    (recipe.parent / "run").mkdir()
    (recipe.parent / "run" / "thesis.tex").write_text("years")
    refuses("train", names=("exists and is not overwritten",), made=True)
    assert (recipe.parent / "run" / "thesis.tex").read_text() == "years"


def test_resuming_with_another_target(refuses, run_directory: Path, tmp_path: Path) -> None:
    before = files(run_directory)
    other = save_tiny_target(tmp_path / "other", seed=1)
    refuses("train", "--resume", "--target.path", str(other), names=("target.digest", "drafter.warm_start"), made=True)
    assert files(run_directory) == before


def test_resuming_with_another_tokenizer(refuses, run_directory: Path, tmp_path: Path, target: Path) -> None:
    before = files(run_directory)
    other = tmp_path / "other"
    shutil.copytree(target, other)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "helper"))
    refuses("train", "--resume", "--target.path", str(other), names=("tokenizer.digest",), made=True)
    assert files(run_directory) == before


def test_resuming_with_another_block_size(refuses, run_directory: Path) -> None:
    before = files(run_directory)
    refuses("train", "--resume", "--drafter.block_size", "8", names=("block_size = 4", "8"), made=True)
    assert files(run_directory) == before


def test_resuming_what_is_not_there(refuses) -> None:
    refuses("train", "--resume", names=("no run", "without --resume"))


def test_a_full_disk_while_saving_keeps_the_checkpoint_before(
    refuses, recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from slipstream.training import checkpoint as module

    genuine, calls = module.save_file, []

    def full(tensors: Any, path: Any, *rest: Any) -> None:
        calls.append(path)
        if "step-2" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        genuine(tensors, path, *rest)

    monkeypatch.setattr(module, "save_file", full)
    refuses("train", names=("step-2", "No space left", "--resume"), made=True)
    assert calls
    checkpoints = recipe.parent / "run" / "checkpoints"
    assert [p.name for p in checkpoints.iterdir()] == ["step-1"]
    assert (checkpoints / "step-1" / "COMPLETE").is_file()
    monkeypatch.setattr(module, "save_file", genuine)
    assert main(["train", str(recipe), "--resume"]) == 0
    assert (recipe.parent / "run" / "drafter" / "config.json").is_file()


def test_exporting_over_something_or_nothing(
    run_directory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    for arguments, name in (
        ([str(run_directory), "--to", str(tmp_path / "mine")], "exists and is not overwritten"),
        ([str(tmp_path / "no-run"), "--to", str(tmp_path / "out")], "not a run directory"),
    ):
        capfd.readouterr()
        assert main(["export", *arguments]) == 2
        message = capfd.readouterr().err
        assert len(message.splitlines()) == 1
        assert name in message
    assert list((tmp_path / "mine").iterdir()) == []
    assert not (tmp_path / "out").exists()
