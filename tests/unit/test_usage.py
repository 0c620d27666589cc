"""What help tells of a setting, and what is said of a slip of the keyboard."""

from __future__ import annotations

from typing import Literal

import pytest

from slipstream.usage import has_effect, kind, misplaced_setting, mistyped_option, unknown_command, written


@pytest.mark.parametrize(
    ("hint", "shown"),
    [
        (bool, "true|false"),
        (int, "N"),
        (float, "X"),
        (str, "TEXT"),
        (str | None, "TEXT"),
        (Literal["a", "b"], "a|b"),
        (tuple[int, ...], "N ..."),
    ],
)
def test_kinds(hint: object, shown: str) -> None:
    assert kind(hint) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(True, "true"), (6e-4, "0.0006"), (3.0, "3"), (0, "0"), (("a", "b"), "a b"), ((), ""), (None, ""), ({}, "")],
)
def test_values_as_they_are_typed(value: object, shown: str) -> None:
    assert written(value) == shown


@pytest.mark.parametrize(
    "rest",
    [[], ["--training.steps", "3"], ["--training.learning_rate", "-inf"], ["--x.y", "-3"], ["stray"], ["--training.z"]],
)
def test_settings_and_their_values_are_no_options(rest: list[str]) -> None:
    assert mistyped_option(rest, ["--resume"]) is None


def test_an_option_like_no_other_gets_no_suggestion() -> None:
    assert mistyped_option(["--qqq"], ["-h", "--help"]) == "unknown option --qqq."


def test_a_command_like_no_other_gets_the_list() -> None:
    assert unknown_command("zzz", ["train", "export"]).startswith(
        "unknown command 'zzz'. The commands are train, export"
    )


def test_settings_behind_the_recipe_and_with_an_equals_sign_are_in_place() -> None:
    assert misplaced_setting(["train", "r.toml", "--training.steps", "3"], "recipe", "r.toml") is None
    assert misplaced_setting(["train", "--training.steps=3", "r.toml"], "recipe", "r.toml") is None
    assert misplaced_setting(["quickstart"], "recipe", None) is None


def test_settings_with_an_effect() -> None:
    assert has_effect("training.steps", "train")
    assert has_effect("run.directory", "train")
    assert has_effect("run.device", "evaluate")
    assert not has_effect("run.directory", "evaluate")
    assert not has_effect("training.steps", "export")
