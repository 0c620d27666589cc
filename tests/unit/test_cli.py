"""The command line: help that can be acted on, one-line refusals with exit code 2, and no torch until it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.cli import build_parser, main
from slipstream.recipe import known_keys

COMMANDS = ("prepare", "train", "evaluate", "export", "preflight", "quickstart")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_setting_with_its_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert f"slipstream {command}" in text
    for key in known_keys():
        assert f"--{key}" in text


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; from slipstream.cli import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 0


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert "quickstart" in shown.out
    assert shown.err.startswith("slipstream: no command given")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "required: recipe"),
        (["train", "nowhere.toml"], "nowhere.toml does not exist"),
        (["train", "r.toml", "--training.stepz", "3"], "Did you mean training.steps?"),
        (["prepare", "r.toml", "--regenerate"], "--output"),
        (["prepare", "r.toml"], "target.path is empty"),
        (["prepare", "r.toml", "--output", "x.jsonl"], "--regenerate"),
        (["prepare", "r.toml", "--show", "-1"], "--show is -1"),
        (["evaluate", "run", "--drafter.block_size", "4"], "no effect on evaluate"),
        (["export", "run", "--to", "x", "--training.steps=4"], "no effect on export"),
        (["train", "r.toml"], "target.path"),
        (["train", "r.toml", "--dry-run"], "target.path"),
        (["preflight", "r.toml"], "target.path"),
        (["evaluate", "r.toml"], "--drafter"),
        (["evaluate", "."], "not a run directory"),
        (["export", ".", "--to", "out"], "not a run directory"),
        (["export", "."], "--to"),
        (["prepare", "r.toml", "--show", "many"], "--show"),
        (["quickstart", "--training.foo", "1"], "training.foo"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "r.toml").write_text("[training]\nsteps = 1\n", encoding="utf-8")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("slipstream: ")
    assert len(error.strip().splitlines()) == 1


def test_every_command_has_a_dry_run() -> None:
    parser = build_parser()
    for command in COMMANDS:
        arguments = {"quickstart": [], "export": ["run", "--to", "x"]}.get(command, ["r.toml"])
        args, _ = parser.parse_known_args([command, *arguments, "--dry-run"])
        assert args.dry_run
