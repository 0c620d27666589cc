"""Recipes: read from one TOML file, changed by ``--section.key value``, checked, and written back.

Unknown keys are refused with the nearest name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import itertools
import os
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from slipstream.config import Recipe
from slipstream.errors import ConfigError
from slipstream.pairs import drafter_path


def known_keys() -> list[str]:
    """Return every setting as ``section.key``."""
    hints = get_type_hints(Recipe)
    return [f"{section}.{f.name}" for section, cls in hints.items() for f in dataclasses.fields(cls)]


def nearest(name: str, known: Sequence[str], cutoff: float = 0.5) -> str:
    """Return `` Did you mean X?`` for the closest known name, comparing the key alone when the section is off."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
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
            raise ConfigError(f"{origin}: unknown section [{section}].{nearest(section, sections)}")
        if not isinstance(body, dict):
            raise ConfigError(
                f"{origin}: {section} is {body!r}, but it is a section: write [{section}] and keys under it"
            )
        for key in body:
            if f"{section}.{key}" not in known:
                raise ConfigError(f"{origin}: unknown key {section}.{key}.{nearest(f'{section}.{key}', known)}")
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


def _spell_booleans(overrides: Sequence[str]) -> list[str]:
    """Turn ``--section.key false`` (or ``=false``) of a yes-or-no setting into the flag that tyro takes."""
    flags = {
        f"{section}.{f.name}"
        for section, cls in get_type_hints(Recipe).items()
        for f in dataclasses.fields(cls)
        if f.type == "bool"
    }
    out: list[str] = []
    rest = list(overrides)
    while rest:
        token = rest.pop(0)
        name, equals, value = token.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not token.startswith("--") or name not in flags:
            out.append(token)
            continue
        if not equals and rest and rest[0].lower() in ("true", "false"):
            value = rest.pop(0)
        section, key = name.split(".")
        if value.lower() not in ("", "true", "false"):
            raise ConfigError(f"--{name} is {value!r}; use true or false")
        out.append(f"--{section}.no-{key}" if value.lower() == "false" else f"--{section}.{key}")
    return out


def _written_value(text: str) -> Any:
    """Return what ``text`` is as JSON or TOML: a number, true or false, a list, a table; otherwise the text itself."""
    import json

    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    with contextlib.suppress(ValueError):
        return json.loads(text)
    with contextlib.suppress(tomllib.TOMLDecodeError):
        found = tomllib.loads(f"value = {text}")
        if list(found) == ["value"] and isinstance(found["value"], (str, int, float, list, dict)):  # a date stays text
            return found["value"]
    return text


def _take_template_kwargs(overrides: Sequence[str], current: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the other overrides, and ``data.template_kwargs`` after those that set it: one by one, or all as JSON."""
    setting = "data.template_kwargs"
    others: list[str] = []
    values = dict(current)
    rest = list(overrides)
    while rest:
        token = rest.pop(0)
        name, equals, text = token.partition("=")
        key = name[len(setting) + 2 :]
        if name[: len(setting) + 2].replace("-", "_") != f"__{setting}" or (key and not key.startswith(".")):
            others.append(token)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{name} has no value; give one behind it, or as {name}=VALUE")
            text = rest.pop(0)
        value = _written_value(text)
        if key:
            values[key[1:]] = value
        elif isinstance(value, dict):
            values = value
        else:
            raise ConfigError(f'--{setting} is {text!r}; give --{setting}.NAME VALUE, or a table as {{"NAME": VALUE}}')
    return others, values


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what lists and tables hold in the end."""
    if isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    else:
        yield value


def apply_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Apply ``--section.key value`` arguments. Raises ConfigError with the nearest name for an unknown one."""
    import tyro

    known = known_keys()
    overrides, template_kwargs = _take_template_kwargs(overrides, recipe.data.template_kwargs)
    overrides = _spell_booleans(overrides)
    for token in overrides:
        if not token.startswith("--"):
            continue
        name = token[2:].split("=", 1)[0].replace("-", "_")
        plain = name.replace(".no_", ".", 1)
        if name not in known and plain not in known:
            raise ConfigError(f"unknown setting --{name}.{nearest(name, known)}")
    stderr, stdout = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stdout):
            # tyro gets an empty table: it would make settings of the keys of one that is not.
            bare = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, template_kwargs={}))
            out = tyro.cli(Recipe, args=list(overrides), default=bare)
            return dataclasses.replace(out, data=dataclasses.replace(out.data, template_kwargs=template_kwargs))
    except SystemExit:
        lines = [line.strip(" │|╭╮╰╯─-+") for line in (stderr.getvalue() + stdout.getvalue()).splitlines()]
        lines = [line for line in lines if line and not line.endswith(("error", "options", "arguments"))]
        help_begins = ("Argument helptext", "For full helptext")
        told = list(itertools.takewhile(lambda line: not line.startswith(help_begins), lines))
        reason = f"{told[0]}: {' '.join(told[1:])}" if len(told) > 1 else " ".join(told or overrides)
        raise ConfigError(f"bad override: {reason}") from None


# Lowest and highest value of every number in a recipe, both allowed. Upper bounds are far above any use: they turn a
# slip of the keyboard into a sentence instead of an allocation that cannot succeed.
RANGES: dict[str, tuple[float, float]] = {
    "run.seed": (0, 2**62),
    "run.threads": (0, 4096),
    "data.row_length": (2, 2**22),
    "data.max_samples": (0, 2**40),
    "regenerate.max_new_tokens": (1, 2**22),
    "regenerate.temperature": (0, 1e3),
    "regenerate.batch_size": (1, 2**16),
    "drafter.layers": (1, 256),
    "drafter.block_size": (2, 1024),
    "drafter.mask_token_id": (-1, 2**31),
    "drafter.heads": (0, 1024),
    "drafter.kv_heads": (0, 1024),
    "drafter.head_dim": (0, 4096),
    "drafter.intermediate_size": (0, 2**20),
    "drafter.rope_theta": (0, 1e12),
    "drafter.sliding_window": (0, 2**22),
    "drafter.init_std": (1e-9, 1e3),
    "training.epochs": (0, 1e9),
    "training.steps": (0, 2**40),
    "training.max_minutes": (0, 1e7),
    "training.rows": (1, 2**16),
    "training.accumulation": (1, 2**16),
    "training.anchors": (1, 2**22),
    "training.draws_per_prefill": (1, 2**16),
    "training.gamma": (0, 1e6),
    "training.dpace_alpha": (0, 1),
    "training.soft_share": (1e-6, 1),
    "training.short_blocks": (0, 0.95),
    "training.learning_rate": (1e-12, 1e3),
    "training.muon_learning_rate": (1e-12, 1e3),
    "training.muon_momentum": (0, 1 - 1e-9),
    "training.min_lr_ratio": (0, 1),
    "training.warmup_ratio": (0, 1),
    "training.decay_ratio": (0, 1),
    "training.weight_decay": (0, 1e3),
    "training.beta1": (0, 1 - 1e-9),
    "training.beta2": (0, 1 - 1e-9),
    "training.clip_norm": (1e-12, 1e12),
    "training.head_chunk": (0, 2**31),
    "training.log_every": (1, 2**40),
    "training.evaluate_every": (0, 2**40),
    "training.evaluate_prompts": (0, 2**31),
    "training.checkpoint_every": (0, 2**40),
    "training.keep_checkpoints": (1, 2**31),
    "topology.queue": (1, 1024),
    "evaluation.max_prompts": (0, 2**31),
    "evaluation.max_new_tokens": (1, 2**22),
    "evaluation.temperature": (0, 1e3),
    "evaluation.batch_size": (1, 2**16),
    "evaluation.block_size": (0, 1024),
}


def validate(recipe: Recipe) -> None:
    """Refuse values that no run can use. Raises ConfigError naming the setting, its value and the cure."""
    t, d = recipe.training, recipe.drafter
    if d.block_size < 2:
        raise ConfigError(
            f"drafter.block_size is {d.block_size}; a block is an anchor and at least one mask: use 2 or more"
        )
    for key, (low, high) in RANGES.items():
        section, name = key.split(".")
        value = getattr(getattr(recipe, section), name)
        if not low <= value <= high:  # nan fails every comparison
            raise ConfigError(f"{key} is {value}; it must be at least {low:g} and at most {high:.15g}")
    if t.steps == 0 and t.epochs <= 0 and t.max_minutes == 0:
        raise ConfigError(f"training.steps is 0 and training.epochs is {t.epochs}; set one of them above 0")
    if 0 < d.rope_theta <= 1:
        raise ConfigError(f"drafter.rope_theta is {d.rope_theta}; give a base above 1, or 0 for the target's")
    for name, value in recipe.data.template_kwargs.items():
        for leaf in _leaves(value):
            if not isinstance(leaf, (str, int, float)):
                raise ConfigError(
                    f"data.template_kwargs.{name} is {'null' if leaf is None else leaf}; use a string (in quotes), a "
                    "number, true or false, or a list or table of them"
                )
    directory = recipe.run.directory
    if not directory or "\0" in directory:
        raise ConfigError(f"run.directory is {directory!r}; give the path of a directory")
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


def require_warm_start(recipe: Recipe) -> None:
    """Raise ConfigError where ``drafter.warm_start`` is set and is no drafter directory. Reads no weights."""
    if not recipe.drafter.warm_start:
        return
    start = str(drafter_path(recipe.drafter.warm_start))
    files = ("config.json",), ("model.safetensors", "model.safetensors.index.json")
    missing = [names[0] for names in files if not any(os.path.isfile(os.path.join(start, name)) for name in names)]
    if missing:
        fault = f"has no {missing[0]}" if os.path.isdir(start) else "is no directory"
        raise ConfigError(
            f"drafter.warm_start is {start}, which {fault}; give a drafter directory: a run's drafter/, a "
            "checkpoint's, or an export"
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
