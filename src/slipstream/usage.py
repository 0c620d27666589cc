"""What ``--help`` tells of the settings, read from the recipe's own dataclasses, and the cure of a mistyped option."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from slipstream.config import Recipe
from slipstream.errors import ConfigError
from slipstream.recipe import known_keys, nearest

# The sections that have an effect on a command; on those that are not named here all have.
SECTIONS: dict[str, tuple[str, ...]] = {
    "prepare": ("run", "target", "data", "regenerate"),
    "plan": ("run", "target", "data", "drafter", "training", "topology"),
    "evaluate": ("run", "target", "data", "evaluation"),
    "export": ("run", "target"),
    "quickstart --resume": ("run", "target", "evaluation"),
}
# A finished run is where it is: these commands are given its path.
IDLE = {("evaluate", "run.directory"), ("export", "run.directory")}
HEADING = "settings (in the recipe as [section] key = value, or behind it on the command line as --section.key value):"


def kind(hint: Any) -> str:
    """Return what a setting of this type takes: its allowed words, or N, X, TEXT; ``...`` where it takes several."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "|".join(parts)
    if origin in (Union, types.UnionType):
        return kind(next(part for part in parts if part is not type(None)))
    if origin is tuple:
        return f"{kind(parts[0])} ..."
    return {bool: "true|false", int: "N", float: "X"}.get(hint, "TEXT")


def written(value: Any) -> str:
    """Return a value as it is written on the command line; an unset one as nothing."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return " ".join(map(written, value))
    return str(value) if value not in (None, {}) else ""


def _texts(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def has_effect(key: str, command: str) -> bool:
    """Say whether a setting (``section.key``) changes what ``command`` does."""
    sections = SECTIONS.get(command)
    return (sections is None or key.split(".")[0] in sections) and (command, key) not in IDLE


def settings_help(command: str, *, heading: str = HEADING, defaults: Recipe | None = None) -> str:
    """List the settings of ``command`` with what each takes and its text, and its default if ``defaults`` are given."""
    lines = [heading, "N is a whole number, X any number; where ... stands, one or more values follow."]
    for section, cls in get_type_hints(Recipe).items():
        if section not in SECTIONS.get(command, (section,)):
            continue
        texts, hints = _texts(cls), get_type_hints(cls)
        lines.append(f"\n  [{section}] {inspect.getdoc(cls)}")
        for field in dataclasses.fields(cls):
            name = f"--{section}.{field.name}"
            if not has_effect(f"{section}.{field.name}", command):
                continue
            hint = hints[field.name]
            head = f"{name}.NAME VALUE" if get_origin(hint) is dict else f"{name} {kind(hint)}"
            shown = written(getattr(getattr(defaults, section), field.name)) if defaults is not None else ""
            lines.append(f"    {head}" + (f" (default {shown})" if shown else ""))
            lines += textwrap.wrap(texts[field.name], 96, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


def command_settings(command: str) -> str:
    """Return the list of settings below a command's help, with the defaults that they have in this command."""
    if command in ("evaluate", "export"):
        return settings_help(
            command, heading="settings (as --section.key value; what is not given is as the run's own recipe says):"
        )
    if command == "quickstart":
        from slipstream.quickstart.settings import packaged_recipe

        heading = (
            "settings (as --section.key value; the defaults are the quickstart's own, its files are in the package):"
        )
        return settings_help(command, heading=heading, defaults=packaged_recipe())
    return settings_help(command, defaults=Recipe())


def refuse_idle_settings(overrides: Sequence[str], command: str) -> None:
    """Refuse settings that ``command`` would ignore: a finished run's shape and training are what they were."""
    for token in overrides:
        key = token.removeprefix("--").partition("=")[0]
        if token.startswith("--") and "." in key and not has_effect(key, command):
            known = ", ".join(f"[{name}]" for name in SECTIONS[command])
            raise ConfigError(f"{token} has no effect on {command}, which takes settings of {known} only")


def unknown_command(word: str, commands: Sequence[str]) -> str:
    """Return what to say of a first word that is no command."""
    cure = nearest(word, commands) or f" The commands are {', '.join(commands)}; see `slipstream --help`"
    return f"unknown command {word!r}.{cure}"


def misplaced_setting(arguments: Sequence[str], what: str, given: str | None) -> str | None:
    """Return what to say where ``given``, taken for the recipe or path, is the value of a setting before it."""
    if given is None or given not in arguments[1:]:
        return None
    before = arguments[arguments.index(given, 1) - 1]
    if not before.startswith("--") or "." not in before or "=" in before:
        return None
    place = f"slipstream {arguments[0]} {what.upper()} {before} {given}"
    return f"{before} {given} stands where the {what} must be; settings come behind it: {place}"


def mistyped_option(rest: Sequence[str], options: Iterable[str]) -> str | None:
    """Return what is wrong with the first of ``rest`` that looks like an option and is no setting; None: nothing is."""
    known = [option[2:] for option in options if option.startswith("--")]
    for token in rest:
        name = token.partition("=")[0]
        if not name.startswith("-") or not name.lstrip("-")[:1].isalpha() or "." in name or _is_number(token):
            continue
        bare = name.lstrip("-")
        if name == f"--{bare}" and bare in known:
            return f"{name} stands before the command; write it behind"
        cure = nearest(bare, known, 0.6).replace("mean ", "mean --") or nearest(bare, known_keys())
        return f"unknown option {name}.{cure}"
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
