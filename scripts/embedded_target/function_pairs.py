"""Documented functions of a source file, as pairs of a question and its answer: the source up to a docstring, the body.

The question is what a programmer would have on the screen: the imports that the function needs and the head of its
class, then decorators, signature and docstring, ending at the closing quotes. The answer starts with the line end after
them, so that question and answer join to source whose tokens are those of any source file.
"""

import ast
import hashlib
import re
import zlib
from collections.abc import Iterator
from typing import NamedTuple

MIN_DOCSTRING = 20  # characters
BODY_LINES = (2, 25)  # without blank ones
MOST_IMPORTS, MOST_ATTRIBUTES, MOST_SIGNATURE = 5, 4, 3  # lines of context: 12, with the class's own
BARE = 64  # of 256 functions: those that get no context but their class's line
QUOTES = ('"""', "'''")
# Bodies that teach a model to repeat itself: lines of one shape in a row, or of two or three in turn, or text that zlib
# squeezes too well.
SAME_SHAPE, LONGEST_PERIOD = 4, 3  # lines that have the shape of one before them
SQUEEZED, SQUEEZED_FROM = 0.33, 300  # share, characters
WORD, STRING = re.compile(r"\w+"), re.compile(r"""[rbfuRBFU]{0,2}(?:"[^"\n]*"|'[^'\n]*')""")
NAME = re.compile(r"\b[A-Za-z_]\w*")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Pair(NamedTuple):
    """A function as question and answer; ``shorter`` are the question with less context, and with the docstring's first
    paragraph only, for when it is too long.

    ``key`` orders pairs at random, the same way on every machine; the other two tell functions that are the same.
    """

    package: str
    file: str
    name: str
    user: str
    assistant: str
    shorter: tuple[str, ...]
    key: str
    head_key: str
    body_key: str


def digest(*parts: str) -> str:
    """A short hash of texts."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def same_head(head: str) -> str:
    """A hash of signature and docstring that spacing, case, quotes and decorators do not change."""
    start = re.search(r"^\s*(?:async\s+)?def\s", head, re.MULTILINE)
    text = head[start.start() if start else 0 :]
    return digest("".join(WORD.findall(text.lower())))


def same_body(body: str) -> str:
    """A hash of a body that spacing, comments and the kind of quotes do not change."""
    return digest("".join(re.sub(r"#.*", "", body).replace("'", '"').split()))


def repeats(body: str) -> bool:
    """Whether lines of a body repeat one another."""
    lines = [line for raw in body.split("\n") if len(line := raw.strip()) > 2]
    shapes = [WORD.sub("w", STRING.sub("s", line)) for line in lines]
    for period in range(1, LONGEST_PERIOD + 1):
        run = 0
        for before, shape in zip(shapes, shapes[period:], strict=False):
            run = run + 1 if shape == before else 0
            if run >= max(SAME_SHAPE, 2 * period):
                return True
    squeezed = re.sub(r"\s+", " ", body).encode()
    return len(squeezed) > SQUEEZED_FROM and len(zlib.compress(squeezed)) < SQUEEZED * len(squeezed)


def functions(tree: ast.Module) -> Iterator[tuple[Function, ast.ClassDef | None]]:
    """The functions of a module and the methods of its classes. Inner functions need more than can be shown."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node, None
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("Test"):
            yield from ((child, node) for child in node.body if isinstance(child, Function))


def declared_only(node: Function) -> bool:
    """Whether a function is an overload or abstract, or its body says nothing but that someone else shall write it."""
    marks = [getattr(n, "attr", getattr(n, "id", "")) for d in node.decorator_list for n in ast.walk(d)]
    if any("overload" in mark or "abstract" in mark for mark in marks):
        return True
    return all(
        isinstance(s, ast.Pass | ast.Raise) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
        for s in node.body[1:]
    )


def documented(node: Function) -> bool:
    """Whether the function starts with a docstring worth the name."""
    first = node.body[0]
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return False
    return isinstance(first.value.value, str) and len(first.value.value.strip()) >= MIN_DOCSTRING


def imports_of(tree: ast.Module) -> list[tuple[str, str, str]]:
    """What the module imports at its top level: (name, what to write before it, what to write for it)."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = "import "
            if isinstance(node, ast.ImportFrom):
                start = f"from {'.' * node.level}{node.module or ''} import "
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                text = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
                found.append((name, start, text))
    return found


def needed_imports(imports: list[tuple[str, str, str]], words: set[str]) -> list[str]:
    """The import statements behind the words, as lines, less what the words do not need."""
    lines: dict[str, list[str]] = {}
    for name, start, text in imports:
        if name in words and "__future__" not in start:
            # `import a, b` would be one line: each its own.
            lines.setdefault(start if start != "import " else start + text, []).append(text)
    return [key if key.startswith("import ") else key + ", ".join(names) for key, names in lines.items()]


def class_line(node: ast.ClassDef, lines: list[str]) -> str:
    """The class statement's first line, as written if it is only one."""
    line = lines[node.lineno - 1]
    if line.endswith(":"):
        return line
    arguments = [ast.unparse(n) for n in (*node.bases, *node.keywords)]
    return f"class {node.name}({', '.join(arguments)}):" if arguments else f"class {node.name}:"


def constructor(node: ast.ClassDef, lines: list[str], words: set[str]) -> list[str]:
    """The constructor's signature with the lines that set attributes among the words; none if there are no such."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            signature = lines[child.lineno - 1 : child.body[0].lineno - 1]
            while signature and not signature[-1].endswith(":"):
                signature.pop()  # comments and blank lines before the first statement
            sets = [
                lines[s.lineno - 1]
                for s in child.body
                if isinstance(s, ast.Assign | ast.AnnAssign) and s.lineno == s.end_lineno
                for target in (s.targets[0] if isinstance(s, ast.Assign) else s.target,)
                if isinstance(target, ast.Attribute) and target.attr in words
            ]
            if sets and 0 < len(signature) <= MOST_SIGNATURE:
                return [*signature, *sets[:MOST_ATTRIBUTES], ""]
    return []


def first_paragraph(docstring: list[str]) -> list[str]:
    """The lines of a docstring through its first paragraph, closed as the whole was; none if there is only one."""
    quotes = docstring[-1][-3:]
    begun = False
    for number, line in enumerate(docstring[:-1]):
        begun |= number > 0 or not line.endswith(quotes)
        if begun and number > 0 and not line:
            kept = docstring[:number]
            if len(kept) == 1:
                return [kept[0] + quotes]
            return [*kept, kept[0][: len(kept[0]) - len(kept[0].lstrip())] + quotes]
    return []


def pair_of(
    node: Function, owner: ast.ClassDef | None, lines: list[str], imports: list[tuple[str, str, str]]
) -> tuple[str, tuple[str, ...], str, str] | None:
    """The question, the question with less, the function's head alone and the answer; None if unfit."""
    if node.name.startswith("test") or not documented(node) or declared_only(node):
        return None
    doc_end = node.body[0].end_lineno or 0
    body = lines[doc_end : node.end_lineno]
    if not lines[doc_end - 1].endswith(QUOTES) or not BODY_LINES[0] <= sum(map(bool, body)) <= BODY_LINES[1]:
        return None
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    head = "\n".join(lines[first - 1 : doc_end])
    assistant = "\n" + "\n".join(body)
    if repeats(assistant):
        return None
    above = [] if owner is None else [class_line(owner, lines)]
    shorter = "\n".join([*above, head])
    words = set(NAME.findall(assistant)) | set(NAME.findall(head))
    used = needed_imports(imports, words | set(NAME.findall(shorter)))[:MOST_IMPORTS]
    blocks = [*used, "", ""] if used else []
    if owner is not None:
        built = constructor(owner, lines, set(re.findall(r"self\.(\w+)", assistant))) if node.name != "__init__" else []
        blocks += [class_line(owner, lines), *built]
    summary = first_paragraph(lines[node.body[0].lineno - 1 : doc_end])
    summed = "\n".join([*above, *lines[first - 1 : node.body[0].lineno - 1], *summary])
    return "\n".join([*blocks, head]), (shorter, summed) if summary else (shorter,), head, assistant


def pairs_of(document: dict[str, str]) -> Iterator[Pair]:
    """The pairs of a cleaned file."""
    text = document["text"]
    if "<|" in text or not any(quotes in text for quotes in QUOTES):
        return  # special tokens written out as text would end a turn
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return  # source for another interpreter than the one that cleaned
    lines = text.split("\n")
    imports = imports_of(tree)
    for node, owner in functions(tree):
        found = pair_of(node, owner, lines, imports)
        if found is not None:
            user, shorter, head, assistant = found
            key = digest(document["package"], document["file"], head, assistant)
            if int(key[:2], 16) < BARE:
                user = shorter[0]
            name = node.name if owner is None else f"{owner.name}.{node.name}"
            keys = key, same_head(head), same_body(assistant)
            yield Pair(document["package"], document["file"], name, user, assistant, shorter, *keys)
