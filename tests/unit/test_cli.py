"""The command line: help that can be acted on, one-line refusals with exit code 2, and no torch until it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.cli import build_parser, main
from slipstream.quickstart.settings import packaged_recipe
from slipstream.recipe import known_keys
from slipstream.usage import has_effect

COMMANDS = ("prepare", "train", "plan", "evaluate", "export", "preflight", "prewarm", "quickstart")
TOOLS = ("doctor", "stress", "cache")


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_setting_that_has_an_effect(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(command, capsys)
    assert f"slipstream {command}" in text
    for key in known_keys():
        assert (f"    --{key} " in text or f"    --{key}.NAME" in text) == has_effect(key, command), key


@pytest.mark.parametrize("command", TOOLS)
def test_help_of_a_tool_lists_no_settings(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(command, capsys)
    assert f"slipstream {command}" in text
    assert "settings" not in text
    assert not any(f"--{key} " in text for key in known_keys())


def test_every_command_is_in_the_help_of_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for command in (*COMMANDS, *TOOLS):
        assert f"\n    {command}" in text


def test_help_of_doctor_tells_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("doctor", capsys)
    assert "--json" in text
    assert "Exit code 1" in text


def test_doctor_is_given_where_slipstream_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import slipstream.compilation.doctor as module

    asked: list[dict[str, object]] = []
    monkeypatch.setattr(module, "doctor", lambda **given: asked.append(given) or 1)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert main(["doctor", "--json"]) == 1
    assert asked[0]["as_json"] is True
    assert asked[0]["slipstream_cache"] == tmp_path


def test_stress_is_handed_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.compilation import stress

    asked: list[object] = []
    monkeypatch.setattr(stress, "run", lambda args, console: asked.append((args.threads, args.guard)) or 1)
    assert main(["stress", "--threads", "3", "--guard", "on"]) == 1
    assert asked == [(3, "on")]


def test_cache_is_handed_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.compilation import cache

    asked: list[object] = []
    monkeypatch.setattr(cache, "run", lambda args, console: asked.append(args) or 0)
    for arguments in (["list"], ["pack", "FILE"], ["unpack", "FILE"], ["prune", "--elsewhere"]):
        assert main(["cache", *arguments]) == 0
    assert len(asked) == 4


def test_prewarm_is_handed_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import slipstream.prewarm as module

    asked: list[object] = []
    monkeypatch.setattr(
        module, "prewarm", lambda recipe, **given: asked.append((recipe.training.steps, given["devices"])) or 0
    )
    (tmp_path / "r.toml").write_text("[training]\nsteps = 1\n", encoding="utf-8")
    assert main(["prewarm", str(tmp_path / "r.toml"), "--training.steps", "7", "--device", "cuda:1"]) == 0
    assert asked == [(7, ["cuda:1"])]


def test_help_of_train_shows_allowed_words_and_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("train", capsys)
    for part in (
        "--run.directory TEXT (default runs/drafter)",
        "--target.dtype auto|float32|bfloat16|float16 (default auto)",
        "--target.revision TEXT\n",
        "--training.attention auto|flex|dense (default auto)",
        "--data.thinking auto|on|off (default auto)",
        "--data.train TEXT ...\n",
        "--data.template_kwargs.NAME VALUE\n",
        "--training.preflight true|false (default true)",
        "--training.learning_rate X (default 0.0006)",
        "--training.steps N (default 0)",
    ):
        assert part in text


def test_help_of_quickstart_shows_its_own_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("quickstart", capsys)
    assert "--run.directory TEXT (default runs/quickstart)" in text
    assert f"--training.max_minutes X (default {packaged_recipe().training.max_minutes:g})" in text
    assert "--data.train TEXT ... (default answers_train.jsonl.gz)" in text
    assert "--resume" in text


def test_help_of_evaluate_claims_no_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert "(default" not in help_of("evaluate", capsys)


def test_the_number_of_tokenizer_threads_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    main(["train", "nowhere.toml"])
    assert "TOKENIZERS_PARALLELISM" not in os.environ


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
        (["trian"], "unknown command 'trian'. Did you mean train?"),
        (["trian", "--help"], "Did you mean train?"),
        (["xyz"], "The commands are prepare, train"),
        (["prepare", "r.toml", "--shw", "3"], "unknown option --shw. Did you mean --show?"),
        (["train", "r.toml", "--resum"], "Did you mean --resume?"),
        (["train", "r.toml", "-resume"], "Did you mean --resume?"),
        (["train", "r.toml", "--dryrun"], "Did you mean --dry-run?"),
        (["train", "r.toml", "--steps", "3"], "Did you mean training.steps?"),
        (["evaluate", "run", "--draftr=x"], "Did you mean --drafter?"),
        (["--versio"], "Did you mean --version?"),
        (["--dry-run", "train", "r.toml"], "--dry-run stands before the command"),
        (["train", "--training.steps", "3", "r.toml"], "slipstream train RECIPE --training.steps 3"),
        (["evaluate", "--run.device", "cpu", "run"], "slipstream evaluate PATH --run.device cpu"),
        (["train", "r.toml", "--drafter.warm_start", "gone"], "drafter.warm_start is gone"),
        (["train", "r.toml", "--drafter.warm_start", "gone", "--dry-run"], "drafter.warm_start is gone"),
        (["preflight", "r.toml", "--drafter.warm_start", "gone"], "drafter.warm_start is gone"),
        (["quickstart", "--drafter.warm_start", "gone"], "drafter.warm_start is gone"),
        (["quickstart", "--resume", "--training.steps", "9"], "no effect on quickstart --resume"),
        (["quickstart", "--resume", "--from", "shipped"], "leave out --target, --from and --prompts"),
        (["quickstart", "--resume", "--target", "smollm2"], "leave out --target, --from and --prompts"),
        (["quickstart", "--from", "nowhere"], "--from"),
        (["quickstart", "--resume", "--run.directory", "nowhere"], "there is no run in nowhere"),
        (["train"], "required: recipe"),
        (["train", "nowhere.toml"], "nowhere.toml does not exist"),
        (["train", "r.toml", "--training.stepz", "3"], "Did you mean training.steps?"),
        (["prepare", "r.toml", "--regenerate"], "--output"),
        (["prepare", "r.toml"], "target.path is empty"),
        (["prepare", "r.toml", "--output", "x.jsonl"], "--regenerate"),
        (["prepare", "r.toml", "--show", "-1"], "--show is -1"),
        (["evaluate", "run", "--drafter.block_size", "4"], "no effect on evaluate"),
        (["export", "run", "--to", "x", "--training.steps=4"], "no effect on export"),
        (["evaluate", "run", "--run.directory", "elsewhere"], "--run.directory has no effect on evaluate"),
        (["train", "r.toml"], "target.path"),
        (["train", "r.toml", "--dry-run"], "target.path"),
        (["preflight", "r.toml"], "target.path"),
        (["prewarm", "r.toml", "--dry-run"], "target.path"),
        (["prewarm", "nowhere.toml"], "nowhere.toml does not exist"),
        (["prewarm", "r.toml", "--drafter.warm_start", "gone"], "drafter.warm_start is gone"),
        (["evaluate", "r.toml"], "--drafter"),
        (["evaluate", "."], "not a run directory"),
        (["export", ".", "--to", "out"], "not a run directory"),
        (["export", "."], "--to"),
        (["prepare", "r.toml", "--show", "many"], "--show"),
        (["quickstart", "--training.foo", "1"], "training.foo"),
        (["doctor", "--jsno"], "unknown option --jsno. Did you mean --json?"),
        (["doctor", "r.toml"], "doctor takes no r.toml; see `slipstream doctor --help`"),
        (["doctor", "--run.device", "cpu"], "doctor takes no --run.device"),
        (["stress", "--thread", "4"], "unknown option --thread. Did you mean --threads?"),
        (["stress", "--guard", "maybe"], "see `slipstream stress --help`"),
        (["stress", "r.toml"], "stress takes no r.toml"),
        (["cache", "list", "--run.device", "cpu"], "cache takes no --run.device"),
        (["cache"], "required: ACTION; see `slipstream cache --help`"),
        (["cache", "prune", "--elsewere"], "unknown option --elsewere. Did you mean --elsewhere?"),
        (["cache", "pack"], "required: FILE; see `slipstream cache pack --help`"),
        (["docter"], "Did you mean doctor?"),
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
    for command in set(COMMANDS) - {"plan"}:  # which is one
        arguments = {"quickstart": [], "export": ["run", "--to", "x"]}.get(command, ["r.toml"])
        args, _ = parser.parse_known_args([command, *arguments, "--dry-run"])
        assert args.dry_run


@pytest.mark.parametrize(
    "arguments", [["evaluate", "x" * 300], ["quickstart", "--resume", "--run.directory", "x" * 300]]
)
def test_a_path_that_no_disk_takes_is_one_line(arguments, capsys):
    assert main(arguments) == 2
    assert "longer than a path may be" in capsys.readouterr().err


def test_an_empty_path_is_not_taken_for_one_that_was_left_out(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path), "--output", ""]) == 2
    assert "--output is empty" in capsys.readouterr().err
