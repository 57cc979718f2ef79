"""The catalogue in docs/testing.md is whole, and the tests that it names exist."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "testing.md"

CELLS = (
    "01 04 09a 09b 09c 11 12 15 16 19 20 21 22 26a 26b 26c 27 29 33 34a 34b 34c 34d 36 37 39 41 43a 43b 44 "
    "46 49 54a 54b 54c 54d 56 59 61 63 64 66a 66b 66c 66d 66e 67a 67b 67c 67d 67e 67f"
)
IDS = [
    *(f"C-{number}" for number in CELLS.split()),
    *(f"D-{number:02}" for number in range(1, 26)),
    *(f"F{number}" for number in range(1, 83)),
    *(f"B{number}" for number in range(1, 61)),
]
ROW = re.compile(r"^\| ([CD]-\d\S*|[FB]\d\S*) \| (.+?) \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NONE = "No test: "


def rows() -> list[tuple[str, str, str]]:
    return ROW.findall(DOCUMENT.read_text(encoding="utf-8"))


@cache
def names_of_tests(path: str) -> frozenset[str]:
    """Names of the tests in a file, which is not run; those of classes as well."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def test_every_id_stands_there_once_and_nothing_else_does() -> None:
    listed = Counter(ident for ident, _, _ in rows())
    assert listed == Counter(IDS)


@pytest.mark.parametrize(("ident", "what", "tested"), rows(), ids=[ident for ident, _, _ in rows()])
def test_each_line_says_what_it_is_and_has_tests_that_exist_or_a_reason(
    ident: str, what: str, tested: str
) -> None:
    assert len(what) >= 5
    tests = TEST.findall(tested)
    if not tests:
        assert tested.startswith(NONE)
        assert len(tested) > len(NONE) + 20
    assert len(set(tests)) == len(tests)
    missing = [f"{path}::{name}" for path, name in tests if name not in names_of_tests(path)]
    assert missing == []
    left = TEST.sub("", tested)
    assert tested.startswith(NONE) or "tests/" not in left, "something there looks like a test and is none"


def test_no_two_lines_say_the_same() -> None:
    said = Counter((ident[0], what) for ident, what, _ in rows())
    assert [what for what, times in said.items() if times > 1] == []


def test_a_test_that_is_gone_would_be_missed() -> None:
    assert "test_a_test_that_is_gone_would_be_missed" in names_of_tests("tests/test_catalogue.py")
    assert "test_no_such_test" not in names_of_tests("tests/test_catalogue.py")
