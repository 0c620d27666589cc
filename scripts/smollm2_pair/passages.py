"""Passages of prose in the audited packages: their descriptions, and the docstrings of modules, classes and functions.

Only what was kept by ``clean_corpus.py`` is read, and the descriptions of wheels whose digest is the table's. Markup is
taken off; lists, code, tables and what speaks of licences, addresses or other people's texts is left out.
"""

import inspect
import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from email.parser import HeaderParser
from pathlib import Path
from typing import NamedTuple

WORDS = (40, 190)  # of a passage; 250 words would be more tokens than a prompt may have
SENTENCES = 2
TECHNICAL, FUNCTION_WORDS = 0.06, 0.28  # of the words: at most, at least
# Descriptions of data sets are their authors' words, not the package's.
QUOTING = frozenset({"tensorflow-datasets"})

DOCSTRING = re.compile(r'(?:\A|:[ \t]*(?:#[^\n]*)?\n)([ \t]*)[rR]?"""(.*?)"""', re.DOTALL)
PARAGRAPH = re.compile(r"\n[ \t]*\n")
# Addresses, licences, rights, other people's texts, notes to self: nothing with these is taken.
MARKS = re.compile(
    r"https?:|www\.|[\w.]+@[\w-]+\.\w|licen[sc]e|copyright|©|all rights|wikipedia|excerpt|quoted|adapted from"
    r"|taken from|TODO|FIXME|XXX|<\||\barXiv\b|\bet al\b|\bdoi\b|stackoverflow|stack overflow|github",
    re.IGNORECASE,
)
NOT_PROSE = re.compile(
    r"^\s*(?:>>>|\.\. |[-*+•] |\d+[.)] |#|\||:\w+|@\w|[A-Z]\w*:$|!\[|<|=====|-----|~~~~)"
    r"|^(?:Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?|References|See Also|Attributes|Usage)\b"
    r":?\s*$",
    re.MULTILINE,
)
CODE_LIKE = re.compile(r"[{}=|<>\\^~]|\w\(|\$|\[\w*\]|::|->")
PLAIN_WORDS = """
    a an the of to in is are was be been it its this that these those and or not for with on as by at from if when which
    who whose can may must should will would has have had do does than then but so you your we our they their there also
    only any all each other more most such into about between how what where while because
"""
COMMON = frozenset(PLAIN_WORDS.split())
TAG = re.compile(r"</?(?:p|br|a|b|i|em|strong|code|div|img|h\d|ul|ol|li|span|center|table|t[dr]|su[pb])\b[^>]*>")
# A passage that begins so hangs on what was left out before it.
HANGING = re.compile(
    r"(?:However|Moreover|Additionally|Alternatively|Also|Otherwise|Thus|Hence|Therefore|Then|But|And|So|Or|Optionally"
    r"|These|Those|They|It|He|She|Its|Their|Note|NOTE|Notes?|Warning|WARNING|Instead|Furthermore|Likewise|Similarly"
    r"|Finally|Second(?:ly)?|In addition|For (?:example|instance|this|these)|In (?:this|that|these|both|other)"
    r"|If (?:so|not)|As (?:such|a result)|One exception|See|Example|Because of this|Such|Both|Here"
    r"|To do (?:this|so|that)|This is (?:because|why|not|also)|Unlike th[ei]s|After th[ai]t|Once|Usage)\b"
)
SHAPE = re.compile(r"\w*_\w*|[a-z]+[A-Z]\w*|\w+\.\w+|[A-Z]{2,}\w*|\w*\d\w*|[A-Z][a-z]+[A-Z]\w*|\w+/\w+")


class Passage(NamedTuple):
    """A text of a package, and what it was: description, module, class or function."""

    package: str
    origin: str
    text: str


def plain(text: str) -> str:
    """The text on one line, without the marks of reStructuredText and Markdown."""
    text = re.sub(r":[\w:+-]+:`~?\.?([^`<]+?)(?:\s*<[^`>]*>)?`", lambda m: m[1].split(".")[-1], text)
    text = re.sub(r"`([^`<]+?)\s*<[^`>]*>`_{0,2}", r"\1", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|(?<!\w)\[\d+\]_?|\|[\w-]+\|", "", text)
    text = re.sub(r"\[([^\]]+)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"`{1,3}([^`]*)`{1,3}_{0,2}", r"\1", text)
    text = re.sub(r"(?<!\w)(\*{1,3}|_{2})(\S(?:[^*]*?\S)?)\1(?!\w)", r"\2", text)
    text = re.sub(r"(?<!\w)_(\w[^_]*\w)_(?!\w)", r"\1", text)
    text = re.sub(r"(?<=\w)_{1,2}(?=[\s.,;:)]|$)", "", text)
    text = re.sub(r"(?<!\w)\[([A-Z][\w ]+)\](?=[\s.,;:)]|$)", r"\1", text)
    text = TAG.sub("", text)
    text = re.sub(r"\s+([.,;:!?])(?=\s|$)", r"\1", " ".join(text.split()))
    return text.replace(" -- ", " - ")


def readable(text: str) -> bool:
    """Whether a text is prose in sentences, long enough and not crowded with identifiers."""
    words = text.split()
    if not WORDS[0] <= len(words) <= WORDS[1] or not text[0].isupper() or text[-1] not in ".!?":
        return False
    if len(re.findall(r"[.!?](?:\s|$)", text)) < SENTENCES or not text.isascii() or HANGING.match(text):
        return False
    bare = [word.strip("\"'()[],;:.!?") for word in words]
    technical = sum(bool(SHAPE.fullmatch(word) or CODE_LIKE.search(word)) for word in bare)
    common = sum(word.lower() in COMMON for word in bare)
    return technical <= TECHNICAL * len(words) and common >= FUNCTION_WORDS * len(words)


def prose(text: str) -> Iterator[str]:
    """The passages of a text: paragraphs of prose that follow one another, in plain words, joined up to the limit."""
    kept: list[str] = []
    for paragraph in [*PARAGRAPH.split(text), ""]:
        indented = re.search(r"\n[ \t]{2,}\S", "\n" + paragraph)
        ends = not paragraph.strip() or indented or NOT_PROSE.search(paragraph) or MARKS.search(paragraph)
        line = "" if ends else plain(paragraph)
        if line.endswith(":") or len(line.split()) < 6 or line[-1:] not in tuple(".!?"):
            line = ""
        if not line or sum(len(p.split()) for p in kept) + len(line.split()) > WORDS[1]:
            yield "\n\n".join(kept)
            kept = []
        if line:
            kept.append(line)
    yield "\n\n".join(kept)


def passages_of(package: str, origin: str, text: str) -> Iterator[Passage]:
    """The passages of a text that are worth a reader's time."""
    for passage in prose(text):
        if passage and readable(passage):
            yield Passage(package, origin, passage)


def docstrings(text: str) -> Iterator[tuple[str, str]]:
    """The docstrings of a source file, by its look: (module, class or function; the docstring)."""
    for found in DOCSTRING.finditer(text):
        if found[2].count(" ") < WORDS[0] - 1 or "\\" in found[2]:
            continue
        before = text[: found.start() + 1].rsplit("\n", 1)[-1].lstrip()
        origin = "module" if found.start() == 0 else "class" if before.startswith("class ") else "function"
        yield origin, inspect.cleandoc(found[2])


def of_sources(path: Path) -> Iterator[Passage]:
    """The passages of a file of ``clean_corpus.py``."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            if document["package"] not in QUOTING:
                for origin, text in docstrings(document["text"]):
                    yield from passages_of(document["package"], origin, text)


def of_wheels(wheels: Iterable[tuple[str, Path]]) -> Iterator[Passage]:
    """The passages of the packages' descriptions."""
    for package, path in wheels:
        with zipfile.ZipFile(path) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1)
            message = HeaderParser().parsestr(archive.read(name).decode("utf-8", "replace"))
        text = message.get_payload() or inspect.cleandoc(message.get("Description") or "")
        yield from passages_of(package, "description", str(text).replace("\r\n", "\n"))
