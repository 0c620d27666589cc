"""The quickstart's recipe, its data inside the package, and what happens to an earlier run."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from slipstream import pairs
from slipstream.errors import ConfigError
from slipstream.evaluation import command as evaluation
from slipstream.quickstart.line import program, quickstart, step_aside
from slipstream.quickstart.settings import Choice
from slipstream.quickstart.summary import what_this_was
from support.tiny_pair import write_pair
from support.tiny_run import lines, make_inputs, overrides


def test_an_earlier_run_is_renamed_and_keeps_everything(tmp_path: Path) -> None:
    run = tmp_path / "quickstart"
    assert step_aside(run) is None
    kept = []
    for text in ("first", "second"):
        run.mkdir()
        (run / "drafter").write_text(text, encoding="utf-8")
        kept.append(step_aside(run))
        assert not run.exists()
    assert [(k / "drafter").read_text(encoding="utf-8") for k in kept if k] == ["first", "second"]
    assert kept[0] != kept[1]


@pytest.mark.parametrize(("lookup", "says"), [(1.5, "prompt lookup, reaches 1.500"), (1.1, "beats the best free")])
def test_the_honest_sentence_names_what_was_measured(lookup: float, says: str) -> None:
    run = SimpleNamespace(tau=1.1234, baselines={"bigram": 1.05, "prompt_lookup": lookup})
    text = what_this_was({"this run": run}, "3.5 minutes", "cpu")
    assert "GPU" not in text
    assert "on a GPU: 2.500 (shipped)" in what_this_was(
        {"this run": run, "shipped": SimpleNamespace(tau=2.5)}, "3.5 minutes", "cpu"
    )
    assert "1.123" in text
    assert "3.5 minutes" in text
    assert "rises" not in text  # it may be 1.000
    assert says in text


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def arguments(root: Path, run: Path) -> list[str]:
    """Return what makes a quickstart of a few steps on a tiny target."""
    return overrides(
        root, run, data__heldout=root / "heldout.jsonl", drafter__mask_token_id=-1, training__checkpoint_every=2,
        training__evaluate_every=0, training__max_minutes=0.0, training__preflight="false", evaluation__batch_size=2,
    )  # fmt: skip


def say(overrides: list[str], **options: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    try:
        quickstart(overrides, console=console, **options)
    except BaseException as error:
        error.add_note(console.file.getvalue())  # type: ignore[attr-defined]
        raise
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_interrupted_while_training_it_goes_on_to_the_end(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    text = say(arguments(root, run))
    assert "for 4 steps, into" in text
    assert "4 steps of training (cpu) show" in text
    finished = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    assert (run / "export" / "config.json").is_file()
    for gone in ("drafter", "export", "checkpoints/step-4"):
        shutil.rmtree(run / gone)
    (run / "evaluation.json").unlink()
    text = say(["--run.directory", str(run)], resume=True)
    assert "resumed from" in text
    assert [row["step"] for row in lines(run)] == [1, 2, 3, 4]
    again = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    assert again["tau"] == finished["tau"]
    assert (run / "export" / "config.json").is_file()


def test_interrupted_after_training_it_says_how_to_go_on_and_trains_no_more(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate_path", interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            say(arguments(root, run))
    assert f"slipstream quickstart --resume --run.directory {run}" in caught.value.__notes__[0]
    before = (run / "metrics.jsonl").read_bytes()
    text = say(["--run.directory", str(run)], resume=True)
    assert "trained already" in text
    assert "Done" in text
    assert (run / "metrics.jsonl").read_bytes() == before
    text = say(["--run.directory", str(run)], resume=True)  # a finished one: nothing is written but the evaluation
    assert "exported already" in text


def test_the_command_is_named_by_its_path_where_no_shell_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("python", "slipstream"):
        (tmp_path / name).write_text("", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv("PATH", "")
    assert program() == f"{tmp_path.name}/slipstream"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == "slipstream"


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no run in .*gone to resume; start it without --resume"):
        say(["--run.directory", str(tmp_path / "gone")], resume=True)


def test_a_pair_with_a_shipped_drafter_is_measured_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_ROOT", write_pair(tmp_path))
    run = tmp_path / "run"
    text = say(["--run.directory", str(run)], choice=Choice())
    assert "from scratch" in text
    assert "the shipped run (GPU)" in text
    own, shipped = (
        json.loads((run / name).read_text(encoding="utf-8")) for name in ("evaluation.json", "evaluation_shipped.json")
    )
    assert (own["block_size"], own["drafted_block_size"], shipped["drafted_block_size"]) == (4, 4, 6)
    assert [tried["block_size"] for tried in shipped["block_comparison"]["tried"]] == [4, 6]
    assert shipped["block_size"] == shipped["block_comparison"]["chosen"]
    assert shipped["drafter"] == str(tmp_path / "embedded" / "drafter")
    assert own["prompts"] == shipped["prompts"] == 3
    assert text.count("(free)") == 4 * len({4, shipped["block_size"]})  # four baselines at each block size

    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(20)), encoding="utf-8")
    again = tmp_path / "again"
    settings = ["--run.directory", str(again), "--regenerate.max_new_tokens", "6"]
    choice = Choice(start="shipped", prompts=mine)
    text = say(settings, choice=choice)
    assert "The target answers the prompts" in text
    assert "show that the line works" not in text  # of a drafter from scratch alone
    argv = json.loads((again / "run.json").read_text(encoding="utf-8"))["argv"]
    assert argv == ["slipstream", "quickstart", *choice.as_arguments(), *settings]
    assert argv[2:] == ["--target", "embedded", "--from", "shipped", "--prompts", str(mine), *settings]
    continued = json.loads((again / "evaluation.json").read_text(encoding="utf-8"))
    assert continued["block_size"] == 6
    assert continued["prompts"] == 2
    assert json.loads((again / "evaluation_shipped.json").read_text(encoding="utf-8"))["prompts"] == 2
