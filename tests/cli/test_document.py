import json
from pathlib import Path

import pytest

from .command import invoked

R = {"nbformat": 4, "nbformat_minor": 4, "cells": [], "metadata": {"language_info": {"name": "R"}}}


def deep_metadata(levels: int) -> bytes:
    inner = '{"a": ' * levels + "1" + "}" * levels
    return f'{{"nbformat": 4, "nbformat_minor": 5, "cells": [], "metadata": {inner}}}'.encode()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.py", b"x = '\xff'", "not UTF-8"),
        ("a.py", b"# coding: klingon", "not UTF-8"),
        ("a.ipynb", b"\xff\xfe{}", "not UTF-8"),
        ("a.ipynb", b"{", "not JSON"),
        ("a.ipynb", b"[" * 100_000, "not JSON"),
        ("a.ipynb", b"[]", "not a notebook"),
        ("a.ipynb", b"{}", "not a notebook"),
        ("a.ipynb", b'{"nbformat": 4, "cells": [{"cell_type": "code"}]}', "not a valid notebook"),
        ("a.ipynb", b'{"nbformat": 4, "cells": 5, "metadata": 6}', "not a valid notebook"),
        ("a.ipynb", b'{"nbformat": 3, "worksheets": [4]}', "not a valid notebook"),
        ("a.ipynb", b'{"nbformat": 9, "cells": []}', "pip install -U nbformat"),
        ("a.ipynb", deep_metadata(600), "not a valid notebook"),
        ("a.ipynb", deep_metadata(20_000), "not "),
        ("a" * 300, b"", "cannot be read"),
        ("a.ipynb", json.dumps(R).encode(), "give a notebook in Python"),
    ],
)
def test_a_bad_file_is_one_sentence_and_2(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    if len(name) < 256:
        (tmp_path / name).write_bytes(content)
    result = invoked("run", tmp_path / name)
    assert (result.code, result.out) == (2, "")
    assert said in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize("name", ["a.py", "a.ipynb"])
def test_an_empty_file_has_no_cells_and_is_fine(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    result = invoked("run", tmp_path / name)
    assert (result.code, result.out) == (0, "")
    assert "has no cells to run" in result.err
