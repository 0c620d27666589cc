"""Recipes: TOML, overrides, refusals that name the nearest key, and a written recipe that reads back equal."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_type_hints

import pytest

from slipstream.config import DrafterSettings, Recipe, TrainingConfig, default_gamma
from slipstream.errors import ConfigError
from slipstream.recipe import (
    RANGES,
    known_keys,
    load_recipe,
    recipe_as_toml,
    recipe_from_dict,
    require_warm_start,
    validate,
)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_numbers_lists_and_tables_are_read(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(
            tmp_path / "r.toml",
            '[training]\nlearning_rate = 3e-4\nsteps = 5\n[data]\ntrain = ["a", "b"]\n'
            "template_kwargs = {enable_thinking = false}\n[drafter]\ntarget_layer_ids = [1, 3]\n",
        )
    )
    assert recipe.training.learning_rate == 3e-4
    assert recipe.data.train == ("a", "b")
    assert recipe.data.template_kwargs == {"enable_thinking": False}
    assert recipe.drafter.target_layer_ids == (1, 3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[training]\nlerning_rate = 1.0\n", "Did you mean training.learning_rate?"),
        ("[trainin]\nsteps = 1\n", "Did you mean training?"),
        ("[drafter]\nlearning_rate = 1.0\n", "Did you mean training.learning_rate?"),
        ("[training]\nsteps = 'many'\n", "training.steps"),
        ("[training]\nschedule = 'linear'\n", "training.schedule"),
        ("training = 3\n", "is a section"),
        ("[training\n", "not valid TOML"),
        ("[drafter]\nblock_size = 1\n", "drafter.block_size is 1"),
        ("[drafter]\nlayers = 2\nlayer_types = ['full_attention']\n", "1 entries for 2 layers"),
        ("[drafter]\nlayers = 1\nlayer_types = ['sliding_attention']\n", "give the window"),
        ("[drafter]\nlayers = 1\nlayer_types = ['causal']\n", "'causal'"),
        ("[training]\nlearning_rate = nan\n", "learning_rate is nan"),
        ("[training]\nclip_norm = 0.0\n", "clip_norm"),
        ("[training]\nlabels = 'none'\n", "training.labels"),
        ("[training]\nsoft_share = 0.0\n", "soft_share is 0"),
        ("[training]\nsoft_share = 1.5\n", "soft_share is 1.5"),
        ("[training]\noptimizer = 'lion'\n", "training.optimizer"),
        ("[training]\nmuon_learning_rate = 0.0\n", "muon_learning_rate is 0"),
        ("[training]\nmuon_momentum = 1.0\n", "muon_momentum is 1"),
        ("[training]\nepochs = 0.0\n", "set one of them above 0"),
        ("[evaluation]\ntemperature = -1.0\n", "temperature"),
    ],
)
def test_a_mistake_is_one_line_with_the_cure(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path / "r.toml", text))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_recipe_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist"):
        load_recipe("nowhere.toml")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--training.stepz", "3"], "Did you mean training.steps?"),
        (["--training.steps", "x"], "--training.steps"),
        (["--training.steps"], "Missing argument"),
        (
            ["--training.optimizer", "lion"],
            "'lion' for argument '--training.optimizer'. Expected one of ('adamw', 'muon')",
        ),
        (["stray"], "stray"),
        (["--steps", "3"], "Did you mean training.steps?"),
        (["--training.steps", "-4"], "training.steps is -4"),
    ],
)
def test_a_bad_override_is_one_line(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, arguments)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", "[training]\nsteps = 5\npreflight = true\n")
    recipe = load_recipe(path, ["--training.steps=7", "--training.no-preflight", "--data.train", "x", "y"])
    assert recipe.training.steps == 7
    assert recipe.training.preflight is False
    assert recipe.data.train == ("x", "y")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--training.preflight", "false"], False),
        (["--training.preflight=False"], False),
        (["--training.no-preflight"], False),
        (["--training.preflight", "true"], True),
        (["--training.preflight"], True),
        (["--training.preflight", "--training.steps", "3"], True),
    ],
)
def test_yes_or_no_settings_take_words_and_flags(arguments: list[str], value: bool) -> None:
    assert load_recipe(None, arguments).training.preflight is value


TEMPLATE_VALUES = [
    ("1.5", 1.5),
    ("3", 3),
    ("-2e-3", -2e-3),
    ("true", True),
    ('"true"', "true"),
    ("'short'", "short"),
    ('[1, 2.5, "a b", [true]]', [1, 2.5, "a b", [True]]),
    ('[{name = "search"}]', [{"name": "search"}]),
]


@pytest.mark.parametrize(("text", "value"), TEMPLATE_VALUES)
def test_template_kwargs_take_scalars_and_lists_from_file_and_command_line(
    tmp_path: Path, text: str, value: object
) -> None:
    path = write(tmp_path / "r.toml", f"[data.template_kwargs]\nx = {text}\n")
    for recipe in (
        load_recipe(path),
        load_recipe(None, ["--data.template_kwargs.x", text]),
        load_recipe(None, ["--training.steps", "2", f"--data.template-kwargs.x={text}"]),
    ):
        assert recipe.data.template_kwargs == {"x": value}
        assert type(recipe.data.template_kwargs["x"]) is type(value)
        assert load_recipe(write(tmp_path / "again.toml", recipe_as_toml(recipe))) == recipe


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([], {"a": 1}),
        (["--data.max_samples", "3"], {"a": 1}),
        (["--data.template_kwargs.style", "very short"], {"a": 1, "style": "very short"}),
        (["--data.template_kwargs.day", "2026-01-02"], {"a": 1, "day": "2026-01-02"}),
        (["--data.template_kwargs.a", "False"], {"a": False}),
        (["--data.template_kwargs.a-b", "2"], {"a": 1, "a-b": 2}),
        (["--data.template_kwargs", '{"b": [1.5], "c": {"d": "e"}}'], {"b": [1.5], "c": {"d": "e"}}),
        (["--data.template_kwargs={b = 2}"], {"b": 2}),
    ],
)
def test_template_kwargs_one_by_one_or_all_at_once(tmp_path: Path, arguments: list[str], value: object) -> None:
    path = write(tmp_path / "r.toml", "[data]\ntemplate_kwargs = {a = 1}\n")
    assert load_recipe(path, arguments).data.template_kwargs == value


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        ("x = 2026-01-02", [], "data.template_kwargs.x is 2026-01-02"),
        ("x = [1, [12:00:00]]", [], "data.template_kwargs.x is 12:00:00"),
        ("", ["--data.template_kwargs.x", "null"], "data.template_kwargs.x is null"),
        ("", ["--data.template_kwargs", "short"], "'short'; give --data.template_kwargs.NAME VALUE"),
        ("", ["--data.template_kwargs.x"], "--data.template_kwargs.x has no value"),
        ("", ["--data.template_kwargs.x", "--training.steps", "3"], "--data.template_kwargs.x has no value"),
        ("", ["--data.template_kwarg.x", "1"], "Did you mean data.template_kwargs?"),
    ],
)
def test_a_template_value_of_no_use_is_refused(tmp_path: Path, text: str, arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path / "r.toml", f"[data.template_kwargs]\n{text}\n"), arguments)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_warm_start_must_be_a_drafter_directory(tmp_path: Path) -> None:
    def recipe(start: object) -> Recipe:
        return recipe_from_dict({"drafter": {"warm_start": str(start)}}, "test")

    require_warm_start(Recipe())
    with pytest.raises(ConfigError, match=r"drafter\.warm_start is .*gone, which is no directory"):
        require_warm_start(recipe(tmp_path / "gone"))
    found = tmp_path / "found"
    found.mkdir()
    write(found / "config.json", "{}")
    with pytest.raises(ConfigError, match=r"found, which has no model\.safetensors") as caught:
        require_warm_start(recipe(found))
    assert "\n" not in str(caught.value)
    for weights in ("model.safetensors", "model.safetensors.index.json"):
        write(found / weights, "")
        require_warm_start(recipe(found))
        (found / weights).unlink()


def test_every_number_has_a_range() -> None:
    numbers = set()
    for section, cls in get_type_hints(Recipe).items():
        numbers |= {f"{section}.{f.name}" for f in dataclasses.fields(cls) if f.type in ("int", "float")}
    assert numbers == set(RANGES)
    validate(Recipe())


@pytest.mark.parametrize("key", sorted(RANGES))
@pytest.mark.parametrize("value", ["-7", "nan", "inf", "99999999999999999999999999"])
def test_impossible_numbers_are_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, [f"--{key}={value}"])
    assert key in str(caught.value).replace("-", "_")
    assert "\n" not in str(caught.value)


def test_a_written_recipe_reads_back_equal(tmp_path: Path) -> None:
    recipe = recipe_from_dict(
        {
            "data": {"train": ['quote " and \\ slash'], "template_kwargs": {"a b": True}},
            "training": {"learning_rate": 6e-4},
            "target": {"revision": "main"},
        },
        "test",
    )
    assert load_recipe(write(tmp_path / "r.toml", recipe_as_toml(recipe))) == recipe
    assert load_recipe(write(tmp_path / "d.toml", recipe_as_toml(Recipe()))) == Recipe()


def test_every_setting_has_a_help_text() -> None:
    source = Path(__file__).resolve().parents[2].joinpath("src/slipstream/config.py").read_text(encoding="utf-8")
    for key in known_keys():
        name = key.split(".")[1]
        line = next(i for i, row in enumerate(source.splitlines()) if row.startswith(f"    {name}: "))
        assert source.splitlines()[line + 1].strip().startswith('"""'), key


def test_decay_table() -> None:
    assert [default_gamma(b) for b in (16, 10, 8, 4)] == [7.0, 5.0, 4.0, 2.0]
    assert TrainingConfig().gamma == 0
    assert DrafterSettings().block_size == 16
