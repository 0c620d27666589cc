"""Recipes: read from one TOML file, changed by ``--section.key value``, checked, and written back.

Unknown keys are refused with the nearest name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

from slipstream.config import Recipe
from slipstream.errors import ConfigError


def known_keys() -> list[str]:
    """Return every setting as ``section.key``."""
    hints = get_type_hints(Recipe)
    return [f"{section}.{f.name}" for section, cls in hints.items() for f in dataclasses.fields(cls)]


def _nearest(name: str, known: Sequence[str]) -> str:
    """Return `` Did you mean X?`` for the closest known name, comparing the key alone when the section is off."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not close:
        leaf = name.rsplit(".", 1)[-1]
        close = [k for k in known if difflib.SequenceMatcher(None, leaf, k.rsplit(".", 1)[-1]).ratio() > 0.7][:1]
    return f" Did you mean {close[0]}?" if close else ""


def recipe_from_dict(tree: dict[str, Any], origin: str) -> Recipe:
    """Build a recipe from nested dicts. Raises ConfigError naming ``origin``, the key, and the nearest known one."""
    import msgspec

    known = known_keys()
    sections = sorted({k.split(".")[0] for k in known})
    for section, body in tree.items():
        if section not in sections:
            raise ConfigError(f"{origin}: unknown section [{section}].{_nearest(section, sections)}")
        if not isinstance(body, dict):
            raise ConfigError(
                f"{origin}: {section} is {body!r}, but it is a section: write [{section}] and keys under it"
            )
        for key in body:
            if f"{section}.{key}" not in known:
                raise ConfigError(f"{origin}: unknown key {section}.{key}.{_nearest(f'{section}.{key}', known)}")
    try:
        return msgspec.convert(tree, Recipe)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {str(error).replace('$.', '')}") from None


def load_recipe(path: Path | str | None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file (None: all defaults), apply overrides, validate. Relative paths stay as written.

    Raises ConfigError for a missing file, bad TOML, an unknown key or a value of the wrong type.
    """
    if path is None:
        recipe = Recipe()
    else:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(f"recipe {path} does not exist; give the path of a .toml file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe {path} cannot be read: {error}") from None
        try:
            tree = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"recipe {path} is not valid TOML: {error}") from None
        recipe = recipe_from_dict(tree, str(path))
    if overrides:
        recipe = apply_overrides(recipe, overrides)
    validate(recipe)
    return recipe


def apply_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Apply ``--section.key value`` arguments. Raises ConfigError with the nearest name for an unknown one."""
    import tyro

    known = known_keys()
    for token in overrides:
        if not token.startswith("--"):
            continue
        name = token[2:].split("=", 1)[0].replace("-", "_")
        plain = name.replace(".no_", ".", 1)
        if name not in known and plain not in known:
            raise ConfigError(f"unknown setting --{name}.{_nearest(name, known)}")
    stderr, stdout = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stdout):
            return tyro.cli(Recipe, args=list(overrides), default=recipe)
    except SystemExit:
        lines = [line.strip(" │|╭╮╰╯─-+") for line in (stderr.getvalue() + stdout.getvalue()).splitlines()]
        lines = [line for line in lines if line and not line.endswith(("error", "options", "arguments"))]
        reason = lines[0] if lines else " ".join(overrides)
        raise ConfigError(f"bad override: {reason}") from None


def validate(recipe: Recipe) -> None:
    """Refuse values that no run can use. Raises ConfigError naming the setting, its value and the cure."""
    t, d, e = recipe.training, recipe.drafter, recipe.evaluation
    if d.block_size < 2:
        raise ConfigError(
            f"drafter.block_size is {d.block_size}; a block is an anchor and at least one mask: use 2 or more"
        )
    at_least_one = {
        "drafter.layers": d.layers,
        "data.row_length": recipe.data.row_length,
        "training.rows": t.rows,
        "training.accumulation": t.accumulation,
        "training.anchors": t.anchors,
        "training.draws_per_prefill": t.draws_per_prefill,
        "training.log_every": t.log_every,
        "training.keep_checkpoints": t.keep_checkpoints,
        "evaluation.max_new_tokens": e.max_new_tokens,
        "evaluation.batch_size": e.batch_size,
        "regenerate.max_new_tokens": recipe.regenerate.max_new_tokens,
        "regenerate.batch_size": recipe.regenerate.batch_size,
    }
    for name, value in at_least_one.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    for name, ratio in {
        "training.min_lr_ratio": t.min_lr_ratio,
        "training.warmup_ratio": t.warmup_ratio,
        "training.decay_ratio": t.decay_ratio,
    }.items():
        if not 0 <= ratio <= 1:
            raise ConfigError(f"{name} is {ratio}; it is a share between 0 and 1")
    for name, number in {
        "training.learning_rate": t.learning_rate,
        "training.clip_norm": t.clip_norm,
        "drafter.init_std": d.init_std,
    }.items():
        if not 0 < number < float("inf"):
            raise ConfigError(f"{name} is {number}; it must be a positive number")
    for name, number in {
        "evaluation.temperature": e.temperature,
        "regenerate.temperature": recipe.regenerate.temperature,
        "training.gamma": t.gamma,
        "training.max_minutes": t.max_minutes,
        "training.weight_decay": t.weight_decay,
    }.items():
        if not 0 <= number < float("inf"):
            raise ConfigError(f"{name} is {number}; it must be 0 or more")
    if t.steps == 0 and t.epochs <= 0 and t.max_minutes == 0:
        raise ConfigError(f"training.steps is 0 and training.epochs is {t.epochs}; set one of them above 0")
    if t.steps < 0 or min(t.evaluate_every, t.checkpoint_every, recipe.data.max_samples, e.max_prompts) < 0:
        raise ConfigError(
            "training.steps, training.evaluate_every, training.checkpoint_every, data.max_samples and "
            "evaluation.max_prompts: none may be negative"
        )
    bad = [kind for kind in d.layer_types if kind not in ("full_attention", "sliding_attention")]
    if bad:
        raise ConfigError(f"drafter.layer_types holds {bad[0]!r}; use full_attention or sliding_attention")
    if d.layer_types and len(d.layer_types) != d.layers:
        raise ConfigError(
            f"drafter.layer_types has {len(d.layer_types)} entries for {d.layers} layers; give one for each"
        )
    if "sliding_attention" in d.layer_types and d.sliding_window < 1:
        raise ConfigError(
            f"drafter.sliding_window is {d.sliding_window}, but a layer is sliding_attention; give the window"
        )


def recipe_as_toml(recipe: Recipe) -> str:
    """Return the resolved recipe as TOML that ``load_recipe`` reads back equal."""
    out: list[str] = []
    for section in dataclasses.fields(Recipe):
        out.append(f"[{section.name}]")
        body = getattr(recipe, section.name)
        for f in dataclasses.fields(body):
            value = getattr(body, f.name)
            if value is not None:
                out.append(f"{f.name} = {_toml_value(value)}")
        out.append("")
    return "\n".join(out)


def _toml_value(value: Any) -> str:
    """Write one TOML value; JSON's string escapes are TOML's."""
    import json

    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
