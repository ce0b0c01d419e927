"""Find phrases that make a reader stop: the patterns of docs/style.md.

This module reads Markdown, the text cells of solutions, and the docstrings, comments and messages
in the folders of `CODE`. A pattern only says where to look. `.ci/prose-exempt.txt` lists the files
that aren't clean yet.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .notebook import ROOT, SOLUTIONS, notebooks, read

EXEMPT = ROOT / ".ci/prose-exempt.txt"
#: Markdown files of the repository, and folders in which all of them count.
PAGES = (
    *(
        "*.md",
        "docs/*.md",
        "docs/bundles/*.md",
        "docs/lectures/*.md",
        "docs/site/**/*.md",
        "hpc/*.md",
        "solutions/*.md",
    ),
    *("utils/**/*.md", "benchmarks/**/*.md"),
)
#: Folders whose Python files are read.
CODE = ("utils", "benchmarks", "hpc", "docs/site")
LONGEST_LINE = 120
#: A string with at least this many words counts as a message.
WORDS_OF_A_MESSAGE = 4

_PLACE = "in|behind|beside|on|under|at|there|above|below|after|between|across|alone|near"
#: What to write instead, by the pattern in running text.
PHRASES = {
    r"\bin place of\b": "instead of",
    r"\bof (?:its|their|his|your|our|one's) own\b": "its own …, or a separate …",
    r"\b(?:inside|outside) of\b": "inside, outside",
    rf"\b(?:stands?|lies?|lying) (?:{_PLACE})\b": "is in, is behind",
    r"\b(?:is|are|was|were|be|been) told\b": "reads, gets, learns, knows",
    r"\btells? (?:of|apart)\b|\btold apart\b": "describes, distinguishes",
    r"\bunder way\b": "pending, traveling, has started",
    r"\bhand(?:s|ed|ing)? (?:it |them )?(?:on|in|out)\b": "pass, submit, send",
    r"\bforetells?\b": "predict",
    r"\bcomes? up\b|\bbrings? up\b": "start",
    r"\bget(?:s|ting)? together\b": "resynchronize",
    r"\ball the same\b": "still",
    r"\bfor ever\b": "forever",
    r"\bbut for\b": "except for",
    r"\bthe more so\b": "in particular",
    r"\b[Mm]eanwhile\b": "at the same time, while …",
    r"\b[Bb]esides\b": "in addition, also",
    r"\balso (?:when|where|if|while|with|in|on|by|to|of|from|at|through)\b": "even if, too",
    r"\b(?:colour|neighbour|behaviour|favour|honour|centre|licence|fibre|metre)(?:s|ed|ing)?\b": (
        "American spelling: color, neighbor, center"
    ),
    r"\b(?:optimi|normali|synchroni|initiali|recogni|organi|seriali|generali|minimi|maximi)s"
    r"(?:e|es|ed|er|ers|ing|ation|ations)\b": "American spelling: optimize",
    r"\bper cent\b": "percent",
}
#: The same for the beginning of a sentence, unless it is a question.
BEGINNINGS = {
    r"Who\b": "name the agent: the rank that …, a student who …",
    r"Where\b": "If …",
    r"Of (?:a|an|the|each|all|so)\b": "name the subject first",
}
#: Parts of Markdown that aren't running text.
_NOT_TEXT = re.compile(
    r"^(?:```|~~~).*?^(?:```|~~~)[^\n]*$|<!--.*?-->|<[^>\n]+>|\$\$.*?\$\$|\$[^$\n]+\$|``[^`]*``|`[^`\n]*`"
    r"|\]\([^)]*\)|https?://\S+",
    re.DOTALL | re.MULTILINE,
)
_SENTENCE = re.compile(
    r"(?:^\s*(?:[-*>|] |\d+\. )?|[.!?] )[*\"“(]*"  # the beginning of a line or of a list item
    r"(?P<text>[A-Z](?:[^.!?]|[.!?](?=\S))*[.!?]?)",  # a point within a number ends no sentence
    re.MULTILINE,
)


class Finding(NamedTuple):
    """A phrase that makes a reader stop.

    Attributes:
        line: the phrase's line in the text, from 1.
        phrase: the phrase as it is written.
        instead: what to write instead.
    """

    line: int
    phrase: str
    instead: str


def findings(text: str) -> Iterator[Finding]:
    """Yield the phrases in a Markdown text that a reader may have to read twice."""
    clean = _NOT_TEXT.sub(lambda found: re.sub(r"[^\n]", "·", found[0]), text)
    for pattern, instead in PHRASES.items():
        for found in re.finditer(pattern, clean):
            yield Finding(_line(clean, found.start()), found[0], instead)
    for sentence in _SENTENCE.finditer(clean):
        words = sentence["text"]
        for pattern, instead in BEGINNINGS.items():
            if re.match(pattern, words) and not words.endswith("?"):
                phrase = " ".join(words.split()[:4])
                yield Finding(_line(clean, sentence.start("text")), phrase, instead)


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def long_lines(text: str) -> Iterator[Finding]:
    """Yield lines that are too long for a diff, except for rows of tables, links and code."""
    without_code = re.sub(
        r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S
    )
    for number, line in enumerate(without_code.splitlines(), start=1):
        if len(line) > LONGEST_LINE and not line.lstrip().startswith(("|", "!", "[", "<", "$$")):
            yield Finding(number, f"{len(line)} characters", f"break it after {LONGEST_LINE}")


def of_markdown(path: Path) -> Iterator[str]:
    """Yield the findings of a page, each with its line."""
    text = path.read_text(encoding="utf-8")
    for found in (*findings(text), *long_lines(text)):
        yield f"line {found.line}: {_advice(found)}"


def of_notebook(path: Path) -> Iterator[str]:
    """Yield the findings of a notebook's text cells, each with the cell."""
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            for found in (*findings(cell.source), *long_lines(cell.source)):
                yield f"cell '{cell.id}', line {found.line}: {_advice(found)}"


def of_code(path: Path) -> Iterator[str]:
    """Yield the findings of a module's docstrings, comments and messages, each with its line."""
    source = path.read_text(encoding="utf-8")
    for line, text in sorted([*_strings(source), *_comments(source)]):
        for found in findings(text):
            yield f"line {line + found.line - 1}: {_advice(found)}"


def _strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, and of each string of several words."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = re.findall(r"[A-Za-z]{2,}", node.value)
            if len(words) >= WORDS_OF_A_MESSAGE:
                yield node.lineno, node.value


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")


def _advice(found: Finding) -> str:
    return f"{found.phrase!r}: write {found.instead}"


def problems() -> list[str]:
    """Return every finding in files that aren't exempt, and exempt files that are now clean."""
    exempt = set(EXEMPT.read_text(encoding="utf-8").split())
    lines = []
    for path, finder in _files():
        name = path.relative_to(ROOT).as_posix()
        of_file = list(finder(path))
        if name not in exempt:
            lines += [f"{name}: {text}" for text in of_file]
        elif not of_file:
            lines.append(f"{name} is clean: remove it from {EXEMPT.relative_to(ROOT)}")
    return lines


def _files() -> Iterator[tuple[Path, Callable[[Path], Iterable[str]]]]:
    """Yield all files to read, each with the function that finds its phrases."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            if ".pytest_cache" not in path.parts:
                yield path, of_markdown
    for path in notebooks(SOLUTIONS):
        yield path, of_notebook
    for path in sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        if path != Path(__file__) and "tests" not in path.parts and "labelled" not in path.parts:
            yield path, of_code
