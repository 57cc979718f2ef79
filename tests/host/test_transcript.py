import asyncio
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_kernel import BlockingRegistry, ConfigError, Limits, Owner
from hermes_kernel.cell.result import KernelReport
from hermes_kernel.cell.toolrecord import RecordedCatalogue
from hermes_kernel.cell.transcript import RanCell, Transcript
from hermes_kernel.host import transcript
from hermes_kernel.host.options import RegistryOptions
from hermes_kernel.host.transcript import SessionWriter, Transcripts, check_transcript_place
from hermes_kernel.lifecycle.key import KernelKey
from hermes_kernel.process import files

from ..cell.test_result import result_of
from ..fakes import FakeKernel, FakeLauncher

OWNER = Owner("a")


def ran(code: str = "1", owner: Owner = OWNER) -> RanCell:
    return RanCell(code, KernelKey(owner, "/bin/python"), result_of(report=KernelReport("k1")), 1e9)


def sources(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    nbformat.validate(json.loads(text))
    return [cell["source"] for cell in json.loads(text)["cells"]]


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


async def keep(keeper: Transcripts, *codes: str, owner: Owner = OWNER) -> str | None:
    """Keep cells one after another; return what is said of the last."""
    said = None
    for code in codes:
        keeper.add(ran(code, owner))
        said = await keeper.written(owner)
    return said


def kept(path: Path, *codes: str, owner: Owner = OWNER) -> None:
    """One session, from its beginning to its end."""

    async def main() -> None:
        keeper = Transcripts(Transcript(path))
        assert await keep(keeper, *codes, owner=owner) is None
        await keeper.close()

    asyncio.run(main())


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, what is written is waited for."""
    monkeypatch.setattr(transcript, "WRITE_TIMEOUT", 30.0)


pytestmark = pytest.mark.usefixtures("patient")


def test_a_session_is_kept_as_it_goes_and_its_file_is_its_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"

    async def main() -> None:
        keeper = Transcripts(Transcript(path))
        for n in range(3):
            assert await keep(keeper, str(n)) is None
            assert sources(path) == [str(m) for m in range(n + 1)]
            assert names(tmp_path) == {"a.ipynb"}
        await keeper.close()

    asyncio.run(main())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    kept(path, "1")
    path.chmod(0o640)
    kept(path, "2")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_reader_finds_a_whole_notebook_at_every_moment(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    kept(path, "0")
    over = threading.Event()
    seen: list[int] = []
    wrong: list[object] = []

    def read() -> None:
        while not over.is_set():
            try:
                seen.append(len(json.loads(path.read_bytes())["cells"]))
            except (OSError, ValueError) as error:
                wrong.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    kept(path, *(f"{n}\n" * 2000 for n in range(60)))
    over.set()
    reader.join()
    assert not wrong
    assert seen == sorted(seen)
    assert len(set(seen)) > 5


def test_many_tasks_keep_their_cells_whole_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"

    async def main() -> None:
        keeper = Transcripts(Transcript(path))
        said = await asyncio.gather(*(keep(keeper, *(f"{n}.{m}" for m in range(5))) for n in range(20)))
        assert not any(said)
        await keeper.close()

    asyncio.run(main())
    assert sorted(sources(path)) == sorted(f"{n}.{m}" for n in range(20) for m in range(5))


def test_cells_that_nobody_has_waited_for_are_written_at_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = Transcripts(Transcript(tmp_path / "a.ipynb"))
        keeper.add(ran("1"))
        keeper.add(ran("2"), RecordedCatalogue("d", ({"name": "f"},)))
        await keeper.close()

    asyncio.run(main())
    assert sources(tmp_path / "a.ipynb") == ["1", "2"]
    told = json.loads((tmp_path / "a.ipynb").read_bytes())["metadata"]["hermes_kernel"]
    assert told["tools"] == {"d": [{"name": "f"}]}


# -- what goes wrong on a disk ------------------------------------------------------------------------------


@pytest.fixture
def disk_is_full(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Make the disk full half through a file, or no more."""

    def set_full(full: bool) -> None:
        def text_bytes(text: str) -> bytes:
            if full and len(text) > 100:
                raise OSError(errno.ENOSPC, "No space left on device")
            return files.text_bytes(text)

        monkeypatch.setattr(transcript, "text_bytes", text_bytes)

    return set_full


def test_a_full_disk_loses_nothing_and_is_said_until_it_is_over(
    tmp_path: Path, disk_is_full: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.ipynb"

    async def main() -> None:
        keeper = Transcripts(Transcript(path))
        assert await keep(keeper, "1") is None
        disk_is_full(True)
        for code in ("2", "3"):
            said = await keep(keeper, code)
            assert said == f"The transcript {path} cannot be written: [Errno 28] No space left on device."
            assert sources(path) == ["1"]
            assert names(tmp_path) == {"a.ipynb"}
        disk_is_full(False)
        assert await keep(keeper, "4") is None
        assert sources(path) == ["1", "2", "3", "4"]
        disk_is_full(True)
        await keep(keeper, "5")
        await keeper.close()

    asyncio.run(main())
    assert caplog.text.count("cannot be written") == 2
    assert "the last cells of the session are not in the transcript" in caplog.text


def test_whatever_fails_in_the_writing_is_said_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        keeper = Transcripts(Transcript(tmp_path / "a.ipynb"))
        with monkeypatch.context() as patch:
            patch.setattr(transcript, "replace_file", lambda *_, **__: 1 // 0)
            said = await keep(keeper, "1")
            assert said is not None
            assert "cannot be written: integer division" in said
        assert await keep(keeper, "2") is None
        await keeper.close()

    asyncio.run(main())
    assert sources(tmp_path / "a.ipynb") == ["1", "2"]


def test_a_disk_that_does_not_answer_keeps_a_result_for_a_moment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    real = transcript.replace_file

    def replace_file(*arguments: Any, **more: Any) -> os.stat_result:
        answers.wait(30)
        return real(*arguments, **more)

    monkeypatch.setattr(transcript, "WRITE_TIMEOUT", 0.05)
    monkeypatch.setattr(transcript, "replace_file", replace_file)

    async def main() -> None:
        keeper = Transcripts(Transcript(tmp_path))
        owners = [Owner(f"owner{n}") for n in range(40)]
        said = await asyncio.gather(*(keep(keeper, "1", "2", owner=owner) for owner in owners))
        assert all(each is not None and each.endswith("is not written yet.") for each in said)
        # A hung disk takes no thread from those who read through results.
        await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, int), 10)
        answers.set()
        await keeper.close()

    asyncio.run(main())
    assert [sources(path) for path in tmp_path.iterdir()] == [["1", "2"]] * 40


@pytest.mark.parametrize("form", ["file", "directory"])
def test_a_directory_that_is_removed_and_made_again_is_written_to(tmp_path: Path, form: str) -> None:
    place = tmp_path / "sessions"
    place.mkdir()
    path = place / "a.ipynb"

    async def main() -> None:
        keeper = Transcripts(Transcript(path if form == "file" else place))
        await keep(keeper, "1")
        path.unlink()
        place.rmdir()
        said = await keep(keeper, "2")
        assert said is not None
        assert "cannot be written" in said
        assert names(tmp_path) == set()
        place.mkdir()
        assert await keep(keeper, "3") is None
        await keeper.close()

    asyncio.run(main())
    assert sources(path) == ["2", "3"]


def test_a_file_that_is_removed_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"

    async def main() -> None:
        keeper = Transcripts(Transcript(path))
        await keep(keeper, "1")
        path.unlink()
        assert await keep(keeper, "2") is None
        await keeper.close()

    asyncio.run(main())
    assert sources(path) == ["2"]


def edited(path: Path) -> None:
    node = json.loads(path.read_bytes())
    node["cells"][0]["source"] = "theirs"
    path.write_text(json.dumps(node))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_text("theirs, and longer than what was there before" * 100)
    os.replace(other, path)


def made_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def made_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def same_size(path: Path) -> None:
    path.write_bytes(b"!" * path.stat().st_size)


@pytest.mark.parametrize("change", [edited, replaced, made_a_directory, made_a_pipe, same_size])
def test_a_file_that_somebody_else_has_changed_is_theirs(
    tmp_path: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.ipynb"

    async def main() -> None:
        keeper = Transcripts(Transcript(path))
        await keep(keeper, "1")
        change(path)
        theirs = path.lstat(), path.is_file() and path.read_bytes()
        assert await keep(keeper, "2", "3") is None
        assert (path.lstat().st_ino, path.is_file() and path.read_bytes()) == (theirs[0].st_ino, theirs[1])
        await keeper.close()

    asyncio.run(main())
    assert sources(tmp_path / "a-2.ipynb") == ["2", "3"]
    assert caplog.text.count("was changed by somebody else") == 1
    assert names(tmp_path) == {"a.ipynb", "a-2.ipynb"}


@pytest.mark.parametrize("change", [edited, replaced, same_size])
def test_a_change_while_the_file_is_being_written_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    path = tmp_path / "a.ipynb"
    kept(path, "1")
    copy = transcript._copy
    changes = iter([change])

    def copied(*arguments: Any) -> None:
        copy(*arguments)
        next(changes, lambda _: None)(path)

    async def main() -> None:
        keeper = Transcripts(Transcript(path))
        await keep(keeper, "2")
        monkeypatch.setattr(transcript, "_copy", copied)
        assert await keep(keeper, "3") is None
        assert b"theirs" in path.read_bytes() or b"!!!" in path.read_bytes()
        assert await keep(keeper, "4") is None
        await keeper.close()

    asyncio.run(main())
    assert sources(tmp_path / "a-2.ipynb") == ["3", "4"]


def test_two_sessions_with_one_file_lose_no_cell(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"

    async def main() -> None:
        keepers = [Transcripts(Transcript(path)) for _ in range(2)]
        for n in range(6):
            assert await keep(keepers[n % 2], str(n)) is None
        for keeper in keepers:
            await keeper.close()

    asyncio.run(main())
    assert sorted([*sources(path), *sources(tmp_path / "a-2.ipynb")]) == list("012345")


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "a.ipynb"
    link.symlink_to(tmp_path / "there" / "b.ipynb")
    kept(link, "1", "2")
    kept(link, "3")
    assert link.is_symlink()
    assert sources(tmp_path / "there" / "b.ipynb") == ["1", "2", "3"]
    assert names(tmp_path / "there") == {"b.ipynb"}


def test_a_link_to_itself_is_said(tmp_path: Path) -> None:
    link = tmp_path / "a.ipynb"
    link.symlink_to(link)
    with pytest.raises(ConfigError, match="give another path"):
        check_transcript_place(Transcript(link))
    with pytest.raises(OSError, match=r"Symlink loop|symbolic links"):
        files.replace_file(link, lambda file: None)


# -- where it may be ----------------------------------------------------------------------------------------


def test_a_transcript_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    for n in range(3):
        check_transcript_place(Transcript(path))
        kept(path, str(n))
    assert sources(path) == ["0", "1", "2"]


def a_file(path: Path) -> None:
    path.write_text("mine")


def an_empty_file(path: Path) -> None:
    path.touch()


def another_notebook(path: Path) -> None:
    nbformat.write(nbformat.v4.new_notebook(), path)


def a_deep_file(path: Path) -> None:
    path.write_text("[" * 100_000)


def not_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [a_file, an_empty_file, another_notebook, a_deep_file, not_text, a_pipe])
def test_another_file_is_refused_and_left_alone(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "a.ipynb"
    make(path)
    before = path.is_file() and path.read_bytes()
    with pytest.raises(ConfigError, match="cannot be continued"):
        RegistryOptions.of({"transcript": path})
    # In a directory it is no reason to keep nothing.
    kept(tmp_path, "1")
    assert (path.is_file() and path.read_bytes()) == before
    assert sources(tmp_path / "a-2.ipynb") == ["1"]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("a.txt", "ends in .ipynb"),
        ("a", "ends in .ipynb"),
        ("none/a.ipynb", "make it first"),
        ("file/a.ipynb", "make it first"),
        ("x" * 300 + ".ipynb", "give another path"),
    ],
)
def test_a_place_where_no_notebook_can_be_is_refused_before_anything_is_started(
    tmp_path: Path, place: str, said: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=said):
        RegistryOptions.of({"transcript": tmp_path / place})
    assert names(tmp_path) == {"file"}


def test_a_home_directory_that_there_is_not_is_a_config_error() -> None:
    place = "~nobody-has-this-name/a.ipynb"
    with pytest.raises(ConfigError, match=r"there is no directory .*~nobody-has-this-name'; make it first"):
        RegistryOptions.of({"transcript": place})
    assert not Transcripts(Transcript(place)).record_tools  # where that is said, nothing else is raised


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    for place in (tmp_path, tmp_path / "a.ipynb"):
        with pytest.raises(ConfigError, match="writable"):
            RegistryOptions.of({"transcript": place})


# -- one notebook each --------------------------------------------------------------------------------------

NASTY = [
    Owner("conversation-17"),
    Owner("../../etc/passwd"),
    Owner("..-..-etc-passwd"),
    Owner("a/b"),
    Owner("a-b"),
    Owner("a", "b"),
    Owner("a", scope="b"),
    Owner("."),
    Owner(".."),
    Owner(".hidden"),
    Owner("x" * 5000),
    Owner("x" * 5001),
    Owner("🦉 é"),
    Owner("\udc80"),
    Owner("a\nb"),
    Owner("a\0b"),
    Owner("A-B"),
    Owner("con"),
    Owner("a.ipynb"),
    Owner("-2"),
    Owner("a-2"),
]  # fmt: skip


def shown(owner: Owner) -> str:
    return str(owner).encode("utf-8", "backslashreplace").decode()


def test_each_owner_has_a_file_of_its_own_in_the_directory_and_nowhere_else(tmp_path: Path) -> None:
    place = tmp_path / "sessions"
    place.mkdir()

    async def main() -> None:
        keeper = Transcripts(Transcript(place))
        for owner in NASTY:
            assert await keep(keeper, shown(owner), owner=owner) is None
        await keeper.close()

    asyncio.run(main())
    assert names(tmp_path) == {"sessions"}
    assert len(names(place)) == len(NASTY)
    assert {"conversation-17.ipynb", "a-b.ipynb"} < names(place)
    found = sorted(source for path in place.iterdir() for source in sources(path))
    assert found == sorted(map(shown, NASTY))


NAMES = st.text(st.characters(codec=None), min_size=1).filter(str.strip)


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(NAMES, st.none() | NAMES, st.text())
def test_an_owners_file_has_a_name_that_every_system_takes(session: str, child: Any, scope: str) -> None:
    name = transcript._file_name(Owner(session, child, scope))
    assert name.endswith(".ipynb")
    assert len(name) <= 100
    assert not name.startswith(".")
    assert set(name) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


def test_an_owner_with_the_name_of_anothers_second_file_does_not_get_it(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = Transcripts(Transcript(tmp_path))
        await keep(keeper, "1")
        edited(tmp_path / "a.ipynb")
        await keep(keeper, "2")  # in a-2.ipynb
        other = Owner("a-2")
        await keep(keeper, "3", owner=other)
        await keep(keeper, "4")
        await keep(keeper, "5", owner=other)
        await keeper.close()

    asyncio.run(main())
    assert sources(tmp_path / "a-2.ipynb") == ["2", "4"]
    assert sources(tmp_path / "a-2-2.ipynb") == ["3", "5"]


def test_of_many_owners_only_the_last_are_held_in_memory_and_all_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcript, "MOST_WRITERS", 3)
    owners = [Owner(f"owner{n}") for n in range(10)]

    async def main() -> None:
        keeper = Transcripts(Transcript(tmp_path))
        for turn in ("first", "second"):
            for owner in owners:
                assert await keep(keeper, turn, owner=owner) is None
                assert len(keeper._writers) <= 3
        await keeper.close()

    asyncio.run(main())
    assert len(names(tmp_path)) == 10
    assert all(sources(path) == ["first", "second"] for path in tmp_path.iterdir())


def test_a_large_notebook_is_read_where_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ipynb"
    kept(path, "1")
    where: list[str] = []
    real = SessionWriter.open

    def opened(writer: SessionWriter) -> None:
        where.append(threading.current_thread().name)
        real(writer)

    monkeypatch.setattr(SessionWriter, "open", opened)
    kept(path, "2")
    assert where == ["hermes-transcript"]


# -- a registry's ------------------------------------------------------------------------------------------


@pytest.fixture
def registry_on(leaves_nothing: None) -> Iterator[Callable[[Path], BlockingRegistry]]:
    """Make registries whose kernel is a script that answers any cell."""
    made: list[BlockingRegistry] = []

    def script(kernel: FakeKernel, request: dict[str, Any]) -> None:
        kernel.good(request)

    def make(path: Path) -> BlockingRegistry:
        registry = BlockingRegistry(
            limits=Limits(timeout=20, max_kernels=20), transcript=path, _launcher=FakeLauncher(script)
        )
        made.append(registry)
        return registry

    yield make
    for registry in made:
        registry.close()


def test_many_threads_with_many_owners_write_one_whole_notebook(
    tmp_path: Path, registry_on: Callable[[Path], BlockingRegistry]
) -> None:
    path = tmp_path / "a.ipynb"
    registry = registry_on(path)

    def talk(n: int) -> None:
        for m in range(5):
            result = registry.execute(f"{n}.{m}", owner=f"owner{n % 4}")
            assert "ranscript" not in (result.warning or "")

    threads = [threading.Thread(target=talk, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sources(path)) == sorted(f"{n}.{m}" for n in range(12) for m in range(5))
    assert names(tmp_path) == {"a.ipynb"}


def test_a_failure_of_the_record_costs_no_result(
    tmp_path: Path, registry_on: Callable[[Path], BlockingRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = registry_on(tmp_path / "a.ipynb")
    monkeypatch.setattr(Transcripts, "add", lambda *_: 1 // 0)
    result = registry.execute("1", owner="a")
    assert result.status.value == "ok"
    assert result.warning is not None
    assert "transcript" in result.warning


def test_a_transcript_that_cannot_be_written_is_said_in_the_warning(
    tmp_path: Path,
    registry_on: Callable[[Path], BlockingRegistry],
    disk_is_full: Callable[[bool], None],
) -> None:
    registry = registry_on(tmp_path / "a.ipynb")
    disk_is_full(True)
    result = registry.execute("1", owner="a")
    assert result.warning is not None
    assert f"The transcript {tmp_path / 'a.ipynb'} cannot be written" in result.warning
    disk_is_full(False)
    registry.close()
    assert sources(tmp_path / "a.ipynb") == ["1"]


KILLED = """
import asyncio, sys
from pathlib import Path
from hermes_kernel.cell.transcript import Transcript
from hermes_kernel.host.transcript import Transcripts
from tests.host.test_transcript import keep

async def main():
    keeper = Transcripts(Transcript(Path(sys.argv[1])))
    for n in range(10_000):
        await keep(keeper, f"{n}\\n" * 500)
        print(n, flush=True)

asyncio.run(main())
"""


def test_a_host_that_is_killed_leaves_a_whole_notebook(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)],
        cwd=Path(__file__).parent.parent.parent,
        stdout=subprocess.PIPE,
        text=True,
    ) as host:
        assert host.stdout is not None
        for _ in range(30):
            told = int(host.stdout.readline())
        host.send_signal(signal.SIGKILL)
        rest = host.stdout.read().split()
    told = int(rest[-1]) if rest else told
    written = sources(path)
    assert len(written) in (told + 1, told + 2)
    assert written == [f"{n}\n" * 500 for n in range(len(written))]
    # It can be continued.
    kept(path, "after")
    assert sources(path)[-1] == "after"
