"""Prompts about the audited packages' functions: complete, write, explain, document, mend, annotate, test, improve.

Reads the pairs that ``scripts/embedded_target/make_functions.py`` wrote. A function is used once. Most of the writing
is asked of functions that need nothing but builtins and the standard library, since nobody can write the others from
their signature alone.
"""

import ast
import builtins
import io
import json
import sys
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from own_prompts import Prompt, draw, load, system_for
from passages import MARKS, plain

BUILTINS, STANDARD = frozenset(dir(builtins)), sys.stdlib_module_names
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
MOST_LINES, MOST_SIGNATURE = 40, 90  # lines of code shown; characters of a signature in a sentence
SUMMARY = (5, 60)  # words of a description

# How often each task is given, of a hundred, to functions that stand alone, that need other modules, and to methods.
KINDS = ("complete", "write", "bug", "test", "types", "explain", "docstring", "improve")
TASKS = {
    "closed": dict(zip(KINDS, (44, 20, 11, 8, 4, 6, 4, 3), strict=True)),
    "open": dict(zip(KINDS, (20, 10, 8, 6, 8, 25, 14, 9), strict=True)),
    "method": dict(zip(KINDS, (30, 0, 5, 0, 0, 33, 20, 12), strict=True)),
}
# Of all prompts: what is there to be had. Where there are fewer of the first, the second fills up.
SHARES = {"closed": 0.5, "open": 0.27, "method": 0.23}

# Tokens that a typical slip mistakes for one another; the first is replaced by the second.
SLIPS = {"<": "<=", ">": ">=", "<=": "<", ">=": ">", "==": "!=", "!=": "==", "+": "-", "+=": "-=", "and": "or"}
SLIPS |= {"or": "and", "True": "False", "False": "True", "min": "max", "max": "min", "any": "all", "all": "any"}
SLIPS |= {"startswith": "endswith", "endswith": "startswith", "keys": "values", "append": "extend", "0": "1", "1": "0"}


class Function(NamedTuple):
    """A function of the corpus, taken apart."""

    package: str
    name: str
    question: str  # up to the end of the docstring
    code: str
    bare: str  # the code without the docstring
    docstring: str
    signature: str
    kind: str  # closed, open, method
    typed: bool
    key: int


def parsed(pair: dict[str, Any]) -> Function | None:
    """The function of a pair, or None if it is not fit to be asked about."""
    code = pair["user"] + pair["assistant"]
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return None
    if not tree.body or code.count("\n") >= MOST_LINES or "\n\n\n" in code.strip("\n").replace("\n\n\n", "", 1):
        return None
    last = tree.body[-1]
    node = last.body[-1] if isinstance(last, ast.ClassDef) else last
    docstring = ast.get_docstring(node) if isinstance(node, FunctionNode) else None
    if docstring is None or MARKS.search(code) or not code.isascii():
        return None
    if not docstring.replace(
        "\n", " "
    ).isprintable():  # an escape sequence of the source, which its text would not show
        return None
    lines = code.split("\n")
    first = node.body[0]
    rest = "\n".join(lines[first.end_lineno :]).lstrip("\n")
    bare = "\n".join([*lines[: first.lineno - 1], rest])
    kind = "method" if isinstance(last, ast.ClassDef) else "closed" if needs_nothing(tree, node) else "open"
    typed = node.returns is not None or any(a.annotation for a in (*node.args.args, *node.args.kwonlyargs))
    signature = f"{node.name}({ast.unparse(node.args)})"
    key = draw(2**60, pair["package"], pair["file"], pair["function"], code)
    return Function(pair["package"], node.name, pair["user"], code, bare, docstring, signature, kind, typed, key)


def needs_nothing(tree: ast.Module, function: FunctionNode) -> bool:
    """Whether a function names nothing but its own, builtins and what is imported above it of the standard library."""
    known = set(BUILTINS)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or "."] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            if any(m.split(".")[0] not in STANDARD for m in modules) or getattr(node, "level", 0):
                return False
            known.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, FunctionNode | ast.ClassDef) or (isinstance(node, ast.ExceptHandler) and node.name):
            known.add(node.name or "")
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            known.add(node.id)
    return not any(
        isinstance(n, ast.Global | ast.Nonlocal) or (isinstance(n, ast.Name) and n.id not in known)
        for n in ast.walk(function)
    )


def slipped(code: str, key: int) -> str | None:
    """The code with one token mistaken for another, or None if there is none to mistake."""
    rows = code.split("\n")
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(code + "\n").readline))
        start = ast.parse(code).body[-1]
    except (tokenize.TokenError, SyntaxError, IndentationError):
        return None
    node = start.body[-1] if isinstance(start, ast.ClassDef) else start
    body = [t for t in tokens if t.start[0] >= node.body[0].lineno and t.string in SLIPS]
    # In a slice or a call a plus may be a sign, and a number anything: only those are taken that compute or compare.
    fit = [t for t in body if t.type in (tokenize.OP, tokenize.NAME) or (t.type == tokenize.NUMBER and index(t))]
    if not fit:
        return None
    token = fit[draw(len(fit), "slip", key)]
    row, column = token.start[0] - 1, token.start[1]
    rows[row] = rows[row][:column] + SLIPS[token.string] + rows[row][column + len(token.string) :]
    changed = "\n".join(rows)
    try:
        ast.parse(changed)
    except SyntaxError:
        return None
    return changed


def index(token: tokenize.TokenInfo) -> bool:
    """Whether a number is an index or is compared."""
    before, after = token.line[: token.start[1]].rstrip(), token.line[token.end[1] :].lstrip()
    return (before.endswith("[") and after.startswith("]")) or before.endswith(("==", ">", "<", "=="))


def summary_of(docstring: str) -> str | None:
    """The first paragraph of a docstring as a description in words, or None if it is none."""
    text = plain(docstring.split("\n\n")[0])
    words = len(text.split())
    if not SUMMARY[0] <= words <= SUMMARY[1] or not text[0].isupper() or text.endswith((":", ",")):
        return None
    return text if text.endswith((".", "!", "?")) else text + "."


def task_for(function: Function) -> str:
    """The task that chance gives a function."""
    place = draw(100, "task", function.key)
    for task, share in TASKS[function.kind].items():
        place -= share
        if place < 0:
            return task
    raise AssertionError("the shares of tasks are not 100")


def prompt_of(function: Function, phrasings: dict[str, list[str]], systems: list[str]) -> Prompt | None:
    """The prompt about a function, or None if its task does not suit it."""
    task = task_for(function)
    code = function.code
    if task in ("explain", "docstring", "improve") or (task in ("bug", "test") and draw(2, "bare", function.key)):
        code = function.bare
    values = {"question": function.question, "code": code, "name": function.name, "signature": function.signature}
    if task == "write":
        values["summary"] = summary_of(function.docstring) or ""
        if not values["summary"] or len(function.signature) > MOST_SIGNATURE or function.name.startswith("__"):
            return None
    elif task == "bug":
        values["code"] = slipped(code, function.key) or ""
        if not values["code"]:
            return None
    elif task == "types" and function.typed:
        return None
    template = phrasings[task][draw(len(phrasings[task]), "template", function.key)]
    user = template.format_map({name: value.strip("\n") for name, value in values.items()})
    core = f"{function.signature} {values['summary']}" if task == "write" else function.code
    prompt = Prompt(f"code/{task}", function.package, function.package, user, core, function=function.name)
    return prompt._replace(system=system_for(prompt, systems, 12))


def candidates(path: Path) -> Iterator[Prompt]:
    """Prompts of a file of pairs, in an order drawn by hash, in which any beginning has the kinds' shares."""
    warnings.simplefilter("ignore")  # other people's escape sequences
    material = load("code")
    groups: dict[str, list[Prompt]] = {kind: [] for kind in SHARES}
    with path.open(encoding="utf-8") as lines:
        functions = [f for line in lines if (f := parsed(json.loads(line))) is not None]
    for function in sorted(functions, key=lambda function: function.key):
        prompt = prompt_of(function, material["function_phrasings"], material["systems"])
        if prompt is not None:
            groups[function.kind].append(prompt)
    taken: Counter[str] = Counter()
    while any(groups[kind][taken[kind] :] for kind in groups):
        left = [kind for kind in groups if taken[kind] < len(groups[kind])]
        kind = min(left, key=lambda kind: (taken[kind] + 1) / SHARES[kind])
        yield groups[kind][taken[kind]]
        taken[kind] += 1
