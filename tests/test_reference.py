"""The reference is what the docstrings say now."""

import runpy
import sys
from pathlib import Path

import pytest

import hermes_kernel

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="each Python writes signatures in its own way")
def test_the_reference_is_up_to_date() -> None:
    made = runpy.run_path(str(DOCS / "make_reference.py"))["reference"]()
    assert (DOCS / "reference.md").read_text(encoding="utf-8") == made, "run python docs/make_reference.py"


def test_the_reference_leaves_no_public_name_out() -> None:
    names = runpy.run_path(str(DOCS / "make_reference.py"))["FIRST"]
    assert set(hermes_kernel.__all__) - set(names) == {"CellEvent", "UNSET"}  # a union, and a word
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert [name for name in names if f"\n## {name}\n" not in text] == []
