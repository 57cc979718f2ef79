from collections.abc import Sequence

import pytest

from hermes_kernel import ConfigError
from hermes_kernel.cli.script import Cell, CellKind, cells_of, decoded


def sources(text: str) -> Sequence[tuple[CellKind, str]]:
    return [(cell.kind, cell.source) for cell in cells_of(text)]


def test_what_stands_before_the_first_marker_is_a_cell() -> None:
    assert sources("a = 1\n# %%\nb = 2\n") == [(CellKind.CODE, "a = 1"), (CellKind.CODE, "b = 2")]


@pytest.mark.parametrize("text", ["", "\n\n", "# %%\n\n# %% nothing\n"])
def test_blank_text_has_nothing_to_run(text: str) -> None:
    assert not any(cell.runs for cell in cells_of(text))


def test_a_title_may_follow_the_marker() -> None:
    assert cells_of("# %% Load the data\nx = 1\n") == [Cell(CellKind.CODE, "x = 1", "Load the data")]


def test_markdown_is_taken_out_of_its_comments() -> None:
    text = '# %% [markdown]\n# # Title\n#\n# text\n# %% More [md]\n"""\nkept\n"""\n# %% [raw]\n# as is\n'
    assert cells_of(text) == [
        Cell(CellKind.MARKDOWN, "# Title\n\ntext"),
        Cell(CellKind.MARKDOWN, "kept", "More"),
        Cell(CellKind.RAW, "as is"),
    ]


def test_a_marker_within_a_string_splits_nothing() -> None:
    text = 'x = """\n# %%\n"""\n# %%\ny = 1'
    assert [cell.source for cell in cells_of(text)] == ['x = """\n# %%\n"""', "y = 1"]


def test_broken_code_and_magics_do_not_hide_the_markers_behind_them() -> None:
    text = "!echo it's\n# %%\n%matplotlib inline\n# %%\nf(\n# %%\nx = '''\n# %%\ny"
    assert len(cells_of(text)) == 5


@pytest.mark.parametrize("line", ["    # %%", "# %%time", "x = 1  # %%", "## %%", "# % %"])
def test_what_only_resembles_a_marker_is_none(line: str) -> None:
    assert len(cells_of(f"a = 1\n{line}\nb = 2")) == 1


@pytest.mark.parametrize(
    "text", ["{{}}", "-" * 20_000, "(" * 150, "[" * 5000, "-" * 1000 + "1", "{[]: 1}", "\0"]
)
def test_a_text_that_is_neither_commented_nor_a_string_is_kept_as_it_stands(text: str) -> None:
    assert cells_of(f"# %% [raw]\n{text}\n") == [Cell(CellKind.RAW, text)]


@pytest.mark.parametrize("encoding", ["rot13", "undefined", "hex", "klingon", "utf-16", "idna"])
def test_an_encoding_that_no_text_has_is_refused(encoding: str) -> None:
    with pytest.raises(
        ConfigError, match=r"a\.py is not UTF-8 text; save it as UTF-8 or declare its encoding"
    ):
        decoded(f"# coding: {encoding}\nx = '\xe4'\n".encode("latin-1"), "a.py")
