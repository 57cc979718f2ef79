"""What a cell shows beside its text: displays within bounds, pages, programs of the shell, figures."""

import base64
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_kernel import BlockingRegistry, CellResult, CellStatus, Limits

from .test_cells_basics import still_answers

Make = Callable[..., BlockingRegistry]

posix = pytest.mark.skipif(sys.platform == "win32", reason="the programs are those of a POSIX shell")


def run(registry: BlockingRegistry, code: str, timeout: float = 30) -> CellResult:
    return registry.execute(code, owner="a", timeout=timeout)


def right(registry: BlockingRegistry, code: str) -> CellResult:
    result = run(registry, code)
    assert (result.status, result.error, result.kernel.ended) == (CellStatus.OK, None, False), code
    return result


def data_of(result: CellResult) -> list[dict[str, Any]]:
    return [output["data"] for output in result.outputs if "data" in output]


def pictures(result: CellResult) -> list[bytes]:
    return [base64.b64decode(data["image/png"]) for data in data_of(result) if "image/png" in data]


@pytest.fixture(params=["fast", "plain"])
def either(request: pytest.FixtureRequest, make_registry: Make, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A registry whose kernels run on our paths, and one whose kernels run on stock ones."""
    monkeypatch.setenv("HERMES_KERNEL_PLAIN", "1" if request.param == "plain" else "0")
    return make_registry()


# Displays


@pytest.mark.timeout(180)
def test_a_gigabyte_of_displays_costs_no_memory_and_its_last_one_is_shown(either: BlockingRegistry) -> None:
    peak = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss"
    right(either, f"import resource; before = {peak}")
    result = run(
        either,
        "for i in range(50_000): display({'text/plain': f'n {i}', 'text/html': 'x' * 20_000}, raw=True)\n"
        "'value'",
        timeout=120,
    )
    assert (result.status, result.error) == (CellStatus.OK, None)
    shown = data_of(result)
    assert 500 < len(shown) < 1000
    assert [data["text/plain"] for data in shown[:2]] == ["n 0", "n 1"]
    assert shown[-1]["text/plain"] == "n 49999"
    assert result.value == "'value'"
    grown = right(either, f"{peak} - before").value
    assert grown is not None
    assert int(grown) < (150 * 2**20 if sys.platform == "darwin" else 150 * 1024)
    assert [data["text/plain"] for data in data_of(right(either, "display('next')"))] == ["'next'"]


def test_a_display_that_is_updated_without_end_ends_with_its_last_state(registry: BlockingRegistry) -> None:
    result = right(
        registry,
        "handles = [display(f'start {n}', display_id=True) for n in range(3)]\n"
        "for i in range(5000):\n    for h in handles: h.update(i)",
    )
    assert [data["text/plain"] for data in data_of(result)] == ["4999"] * 3


def test_cleared_displays_make_room_for_others(registry: BlockingRegistry) -> None:
    result = right(
        registry,
        "from IPython.display import clear_output\n"
        "for i in range(3000):\n    clear_output(wait=True)\n    display(i)",
    )
    assert [data["text/plain"] for data in data_of(result)] == ["2999"]
    result = right(registry, "for i in range(2500): display(i)\nclear_output()\ndisplay('kept')")
    assert [data["text/plain"] for data in data_of(result)] == ["'kept'"]


@pytest.mark.parametrize("way", ["display(x)", "x"])
def test_a_display_that_is_too_large_says_what_it_left_out(registry: BlockingRegistry, way: str) -> None:
    right(registry, "class X:\n    def _repr_html_(self): return 'y' * 40_000_000\nx = X()")
    (data,) = data_of(right(registry, way))
    assert list(data) == ["text/plain"]
    assert ".X at 0x" in data["text/plain"]
    assert "left out: text/html of 40,000,000 bytes" in data["text/plain"]
    still_answers(registry)


BROKEN = {
    "html": "_repr_html_(self): return 42",
    "bundle": "_repr_mimebundle_(self, **k): return 42",
    "number": "_repr_mimebundle_(self, **k): return {'text/html': 42, 'text/plain': 'shown'}",
    "object": "_repr_mimebundle_(self, **k): return {'text/html': object(), 'text/plain': 'shown'}",
    "key": "_repr_mimebundle_(self, **k): return {('a',): object(), 'text/plain': 'shown'}",
    "nan": "_repr_mimebundle_(self, **k): return {'application/json': float('nan'), 'text/plain': 'shown'}",
    "metadata": "_repr_mimebundle_(self, **k): return {'text/plain': 'shown'}, 3",
    "bytes": "_repr_mimebundle_(self, **k): return {'image/png': b'abc', 'text/plain': 'shown'}",
}


@pytest.mark.parametrize("way", ["x", "display(x)"])
def test_an_odd_form_of_an_object_does_not_break_its_cell(either: BlockingRegistry, way: str) -> None:
    for name, method in BROKEN.items():
        if name == "metadata" and way != "x":  # IPython's own display() refuses it
            continue
        right(either, f"class shown:\n    def {method}\nx = shown()")
        result = run(either, f"{way}\nprint('after')" if way != "x" else way)
        assert (result.status, result.error) == (CellStatus.OK, None), name
        (data,) = data_of(result)
        assert "shown" in data["text/plain"], name
        still_answers(either)


def test_html_of_an_object_stands_beside_its_text(registry: BlockingRegistry) -> None:
    right(
        registry,
        "class T:\n    def _repr_html_(self): return '<b>t</b>'\n    def __repr__(self): return 'tt'",
    )
    for way in ("T()", "display(T())"):
        assert data_of(right(registry, way)) == [{"text/plain": "tt", "text/html": "<b>t</b>"}]


# Pages

PAGES = {
    "len?": "Return the number of items",
    "len??": "Return the number of items",
    "?len": "Return the number of items",
    "%pinfo len": "Return the number of items",
    "%pdoc len": "Return the number of items",
    "import textwrap\n%psource textwrap.dedent": "def dedent(",
    "textwrap.dedent??": "def dedent(",
    "%pfile textwrap": "def dedent(",
    "help(len)": "Return the number of items",
    "help('textwrap')": "dedent(text)",
    "import pydoc; pydoc.help(len)": "Return the number of items",
    "from IPython.core import page; page.page('a page')": "a page",
    "page.page({'text/plain': 'a page', 'text/html': '<b>a page</b>'})": "a page",
    "page.page('\\x1b[31mred\\x1b[0m b\\x08bo\\x08ol\\x08ld')": "red bold",
    "%quickref": "IPython",
    "no_such_name?": "not found",
}


def test_what_ipython_would_page_is_in_the_text_plain(either: BlockingRegistry) -> None:
    for code, part in PAGES.items():
        result = right(either, code)
        assert part in result.text, code
        assert part in result.stdout, code
        assert "\x1b" not in result.text, code
        assert "\x08" not in result.text, code


# Programs


@posix
def test_shell_commands_are_over_when_the_shell_is(either: BlockingRegistry) -> None:
    for code, stdout in (
        ("%%bash\nsleep 600 &\necho hi", "hi\n"),
        ("%%sh\nsleep 600 &\necho hi", "hi\n"),
        ("%%script bash\nsleep 600 &\necho hi", "hi\n"),
        ("%%bash --out o\nsleep 600 &\necho hi", ""),
        ("print(o)", "hi\n\n"),
        ("!sleep 600 & echo hi", "hi\n"),
        ("x = !sleep 600 & echo hi\nprint(x)", "['hi']\n"),
        ("x = !sleep 600 &\nprint(x)", "[]\n"),
        ("%%capture c\n!sleep 600 & echo hi", ""),
        ("print(c.stdout)", "hi\n\n"),
    ):
        result = run(either, code, timeout=10)
        assert (result.status, result.error, result.stdout) == (CellStatus.OK, None, stdout), code


@posix
def test_the_output_of_programs_stands_in_order_with_prints(registry: BlockingRegistry) -> None:
    for command in ("!echo b", "get_ipython().run_cell_magic('bash', '', 'echo b')"):
        for _ in range(20):
            assert right(registry, f"print('a')\n{command}\nprint('c')").stdout == "a\nb\nc\n"
    assert right(registry, "%%bash\necho a; echo b >&2; echo c").stderr == "b\n"


@posix
def test_a_script_that_fails_is_an_error_with_its_code_and_only_the_cells_frames(
    registry: BlockingRegistry,
) -> None:
    result = run(registry, "%%bash\necho hi; exit 3")
    assert (result.status, result.stdout) == (CellStatus.ERROR, "hi\n")
    assert result.error is not None
    assert result.error.ename == "CalledProcessError"
    assert "non-zero exit status 3" in result.error.evalue
    assert "IPython/core" not in result.error.traceback
    assert "hermes_kernel" not in result.error.traceback
    assert run(registry, "%%bash\nkill -9 $$").error is not None
    assert right(registry, "%%bash --no-raise-error\necho hi; exit 3").stdout == "hi\n"
    assert right(registry, "!exit 3\nprint(_exit_code)").stdout == "3\n"
    assert right(registry, "x = !exit 4\nprint(_exit_code)").stdout == "4\n"
    assert "no-such-program" in right(registry, "%%script no-such-program\nx").stdout
    assert "needs a program" in run(registry, "%%script\nx").text


@posix
def test_the_options_of_scripts_work(registry: BlockingRegistry) -> None:
    right(registry, "%%bash --out o --err e\necho out; echo err >&2")
    assert right(registry, "o, e").value == "('out\\n', 'err\\n')"
    right(registry, "%%bash --bg --out o --proc p\necho background")
    assert right(registry, "print((await o.read()).decode())").stdout == "background\n\n"
    assert right(registry, "%%bash -s one\necho $1; exit 0").stdout == "one\n"
    assert right(registry, "%%python3\nprint(6 * 7)").stdout == "42\n"
    assert right(registry, "word = 'w'\n!echo {word} $word").stdout == "w w\n"
    assert right(registry, "x = !echo {word}; echo e >&2\nx").value == "['w', 'e']"
    assert right(registry, "%sx echo one").value == "['one']"
    assert right(registry, "%%sx\necho one\necho two").value == "['one', 'two']"


@posix
def test_what_a_cell_redirects_holds_for_its_programs(registry: BlockingRegistry) -> None:
    right(registry, "import contextlib, io, sys; f = io.StringIO()")
    right(registry, "with contextlib.redirect_stdout(f):\n    print('a')\n    !echo b\n    print('c')")
    assert right(registry, "print(f.getvalue())").stdout == "a\nb\nc\n\n"
    result = right(registry, "with contextlib.redirect_stdout(sys.stderr):\n    !echo b")
    assert (result.stdout, result.stderr) == ("", "b\n")
    right(registry, "%%capture c\n%%bash\necho out; echo err >&2")
    assert right(registry, "c.stdout, c.stderr").value == "('out\\n', 'err\\n')"
    assert right(registry, "sys.stdout = None\n!echo x").stdout == "x\n"


@posix
@pytest.mark.parametrize(
    "code",
    [
        "!echo $$ > {mark}; sleep 60; :",
        "x = !echo $$ > {mark}; sleep 60; :",
        "%%bash\necho $$ > {mark}\nsleep 60",
        "%%bash --out o\necho $$ > {mark}\nsleep 60",
    ],
)
def test_an_interrupt_ends_the_program_and_keeps_the_kernel(
    make_registry: Make, tmp_path: Path, code: str
) -> None:
    registry = make_registry(limits=Limits(interrupt_grace=5))
    right(registry, "z = 1")
    mark = tmp_path / "pid"
    result = run(registry, code.replace("{mark}", str(mark)), timeout=1)
    assert (result.status, result.kernel.ended) == (CellStatus.TIMED_OUT, False)
    assert result.duration < 5
    assert not psutil.pid_exists(int(mark.read_text()))
    assert right(registry, "z").value == "1"


# Figures


def test_a_figure_is_shown_once_at_the_end_of_its_cell(either: BlockingRegistry) -> None:
    pytest.importorskip("matplotlib")
    result = right(either, "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3]); print('plotted')")
    (png,) = pictures(result)
    assert png.startswith(b"\x89PNG")
    assert (result.stdout, result.stderr) == ("plotted\n", "")
    assert result.text.startswith("plotted")
    assert len(pictures(right(either, "plt.plot([1]); plt.show()"))) == 1
    assert len(pictures(right(either, "for _ in range(3): plt.figure(); plt.plot([1])"))) == 3
    assert pictures(right(either, "print('none')")) == []
    assert pictures(right(either, "plt.plot([1]); plt.close('all')")) == []


def test_a_figure_of_a_backend_without_windows_is_shown_once_and_again_when_it_changes(
    registry: BlockingRegistry,
) -> None:
    pytest.importorskip("matplotlib")
    result = right(
        registry,
        "import os; os.environ['DISPLAY'] = ':99'\nimport matplotlib; matplotlib.use('Agg')\n"
        "import matplotlib.pyplot as plt; _ = plt.plot([1, 2]); plt.show(); plt.show()",
    )
    assert len(pictures(result)) == 1
    assert (result.stdout, result.stderr) == ("", "")
    assert right(registry, "plt.get_backend().lower()").value == "'agg'"
    assert pictures(right(registry, "print('nothing new')")) == []
    assert len(pictures(right(registry, "plt.plot([3]); plt.show()"))) == 1
    assert len(pictures(right(registry, "plt.gcf()"))) == 1
    assert pictures(right(registry, "plt.savefig(os.devnull, format='png')")) == []
    assert pictures(right(registry, "plt.plot([4]); plt.close('all')")) == []


def test_a_backend_of_the_environment_is_respected(
    make_registry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "svg")
    registry = make_registry(env_passthrough=["MPLBACKEND"])
    result = right(registry, "import matplotlib.pyplot as plt; plt.plot([1]); print(plt.get_backend())")
    assert result.stdout == "svg\n"
    assert len(pictures(result)) == 1


def test_matplotlib_is_not_loaded_for_a_cell_that_does_not_use_it(either: BlockingRegistry) -> None:
    result = right(either, "import sys; [m for m in sys.modules if m.partition('.')[0] == 'matplotlib']")
    assert result.value == "[]"


def test_a_figure_that_cannot_be_drawn_fails_its_cell_alone(registry: BlockingRegistry) -> None:
    pytest.importorskip("matplotlib")
    right(registry, "import matplotlib; matplotlib.use('Agg'); import matplotlib.pyplot as plt")
    result = run(registry, "_ = plt.plot([1]); _ = plt.title('$\\\\nocommand$')")
    assert "ValueError" in result.text
    assert pictures(result) == []
    still_answers(registry)


def test_a_cell_may_choose_which_of_its_values_are_shown(registry: BlockingRegistry) -> None:
    registry.execute("get_ipython().ast_node_interactivity = 'all'", owner="a")
    assert registry.execute("1\n2", owner="a").text == "1\n2\n"
    assert registry.execute("1\n2", owner="a", show_value=False).text == ""
    assert registry.execute("1\n2", owner="a").text == "1\n2\n"
