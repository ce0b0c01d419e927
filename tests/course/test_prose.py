"""The lint for prose: it finds what makes a reader stop, and leaves plain sentences alone."""

from __future__ import annotations

import pytest

from utils.course import prose

#: A sentence for each kind of phrase, and the phrase in it.
STUMBLING = {
    "It sends a copy in place of the tensor.": "in place of",
    "Each rank has a clock of its own.": "of its own",
    "The rank is stuck inside of a library.": "inside of",
    "The message stands in the log.": "stands in",
    "Every rank is told the result.": "is told",
    "Messages that are under way are lost.": "under way",
    "Each rank hands on the chunk.": "hands on",
    "You can foretell the bucket.": "foretell",
    "Four ranks come up in a second.": "come up",
    "The loss falls all the same.": "all the same",
    "The neighbour sends first.": "neighbour",
    "The optimiser takes a step.": "optimiser",
    "It works also when a rank is late.": "also when",
    "Who waits longer says so.": "Who waits longer says",
    "Where there is none, leave it out.": "Where there is none,",
}
PLAIN = """
# Where the time goes

A rank that has waited for 20 ms reports it. Where is the limit? Each rank has its own clock.

- Who reads the marker? Rank 0.

```sh
echo "in place of"    # code is left alone, and so is `inside of`
```
"""


@pytest.mark.parametrize(("sentence", "phrase"), STUMBLING.items())
def test_an_author_reads_which_phrase_makes_readers_stop(sentence, phrase):
    found = list(prose.findings(f"A plain line.\n{sentence}"))
    assert [(finding.line, finding.phrase) for finding in found] == [(2, phrase)]
    assert found[0].instead


def test_plain_sentences_questions_headings_and_code_are_left_alone():
    assert list(prose.findings(PLAIN)) == []


def test_a_line_that_is_too_long_for_a_diff_is_found_unless_it_is_a_row_or_code():
    long = "word " * 30
    text = f"{long}\n| {long} |\n```\n{long}\n```\n"
    assert [finding.line for finding in prose.long_lines(text)] == [1]


def test_messages_docstrings_and_comments_are_read(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""A clock of its own."""\n# in place of a rank\nWORD = f"rank {1} stands in the way"\n'
    )
    assert [line.partition(":")[0] for line in prose.of_code(module)] == [
        "line 1",
        "line 2",
        "line 3",
    ]


def test_a_file_that_is_clean_again_leaves_the_list_of_exempt_files(tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    page.write_text("A plain line.\n")
    (tmp_path / "exempt.txt").write_text("README.md\n")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "EXEMPT", tmp_path / "exempt.txt")
    monkeypatch.setattr(prose, "SOLUTIONS", tmp_path)
    assert prose.problems() == ["README.md is clean: remove it from exempt.txt"]
    page.write_text("A clock of its own.\n")
    assert prose.problems() == []
    (tmp_path / "exempt.txt").write_text("")
    assert prose.problems() == ["README.md: line 1: 'of its own': write its own …, or a separate …"]
