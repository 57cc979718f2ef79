import asyncio
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning import KernelProvisionerFactory

from hermes_kernel.cli.spec import SOURCES
from hermes_kernel.errors import ConfigError
from hermes_kernel.host.attach import AttachProvisioner
from hermes_kernel.host.provisioner import HermesProvisioner

from .command import ROOT, hermes, invoked

PUBLISHED = ROOT / "kernelspec" / "hermes"
SPECS = ("hermes", "hermes-live")
FILES = ("kernel.json", "logo-32x32.png", "logo-64x64.png", "logo-svg.svg")
BUILD_WAIT = 100


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's Jupyter of the test's own: nothing is read from or written to the real one."""
    for name in ("DATA", "CONFIG", "RUNTIME"):
        monkeypatch.setenv(f"JUPYTER_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.delenv("JUPYTER_PATH", raising=False)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return tmp_path / "data"


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    place = tmp_path / "prefix"
    place.mkdir()
    return place


def kernels(prefix: Path) -> Path:
    return prefix / "share" / "jupyter" / "kernels"


def content(directory: Path) -> dict:  # type: ignore[type-arg]
    found: dict = json.loads((directory / "kernel.json").read_text())  # type: ignore[type-arg]
    return found


@pytest.mark.parametrize("name", SPECS)
def test_the_package_and_the_wheels_data_hold_the_same_specs(name: str) -> None:
    source, published = SOURCES / name, PUBLISHED.with_name(name)
    for place in (source, published):
        assert sorted(path.name for path in place.iterdir()) == sorted(FILES)
    for file in FILES:
        assert (source / file).read_bytes() == (published / file).read_bytes()
    assert sorted(path.name for path in SOURCES.iterdir()) == sorted(SPECS)


@pytest.mark.parametrize("options", [(), ("--user",)])
def test_a_user_gets_the_spec_where_jupyter_finds_it(options: tuple[str, ...], data: Path) -> None:
    ended = invoked("spec", "install", *options)
    place = data / "kernels" / "hermes"
    assert (ended.code, ended.err) == (0, "")
    assert str(place) in ended.out
    found = KernelSpecManager().get_kernel_spec("hermes")
    assert found.resource_dir == str(place)
    assert found.argv[0] == sys.executable
    for file in FILES[1:]:
        assert (place / file).read_bytes() == (PUBLISHED / file).read_bytes()


def test_what_is_installed_differs_from_the_wheels_spec_in_its_interpreter_alone(prefix: Path) -> None:
    assert invoked("spec", "install", "--prefix", prefix).code == 0
    installed, published = content(kernels(prefix) / "hermes"), content(PUBLISHED)
    assert installed["argv"].pop(0) == sys.executable
    assert published["argv"].pop(0) == "python"
    assert installed == published


def test_below_a_prefix_that_jupyter_does_not_search_the_user_is_told_what_to_set(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = prefix / "share" / "jupyter"
    ended = invoked("spec", "install", "--prefix", prefix)
    assert f"add {searched} to JUPYTER_PATH" in ended.err
    monkeypatch.setenv("JUPYTER_PATH", str(searched))
    assert invoked("spec", "install", "--prefix", prefix).err == ""
    assert "hermes" in KernelSpecManager().find_kernel_specs()


def test_an_environments_own_spec_follows_its_environment(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(prefix))
    assert invoked("spec", "install", "--sys-prefix").code == 0
    assert content(kernels(prefix) / "hermes") == content(PUBLISHED)
    assert invoked("spec", "remove", "--sys-prefix").code == 0
    assert list(kernels(prefix).iterdir()) == []


def test_a_relative_prefix_is_one_of_the_working_directory(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prefix)
    assert str(kernels(prefix) / "hermes") in invoked("spec", "install", "--prefix", ".").out
    assert invoked("spec", "remove", "--prefix", ".").code == 0


def test_a_spec_of_ours_is_replaced(prefix: Path) -> None:
    invoked("spec", "install", "--prefix", prefix)
    place = kernels(prefix) / "hermes"
    old = content(place)
    old["argv"][0] = "/usr/bin/old"
    (place / "kernel.json").write_text(json.dumps(old))
    (place / "left.txt").touch()
    assert invoked("spec", "install", "--prefix", prefix).code == 0
    assert content(place)["argv"][0] == sys.executable
    assert sorted(path.name for path in place.iterdir()) == sorted(FILES)


def test_another_name_is_shown_as_another_kernel(prefix: Path) -> None:
    assert invoked("spec", "install", "--prefix", prefix, "--name", "Agent").code == 0
    assert content(kernels(prefix) / "agent")["display_name"] == "Hermes (agent)"
    assert invoked("spec", "remove", "--prefix", prefix, "--name", "agent").code == 0
    assert list(kernels(prefix).iterdir()) == []


def test_remove_takes_away_what_install_has_put_there(data: Path) -> None:
    invoked("spec", "install")
    ended = invoked("spec", "remove")
    assert (ended.code, ended.err) == (0, "")
    assert str(data / "kernels" / "hermes") in ended.out
    with pytest.raises(NoSuchKernel):
        KernelSpecManager(ensure_native_kernel=False, kernel_dirs=[str(data / "kernels")]).get_kernel_spec(
            "hermes"
        )


def test_remove_of_what_is_not_there_is_2_and_says_where_to_look(prefix: Path) -> None:
    ended = invoked("spec", "remove", "--prefix", prefix)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    assert "there is no kernel spec 'hermes'" in ended.err
    assert "jupyter kernelspec list" in ended.err


@pytest.mark.parametrize("command", ["install", "remove"])
@pytest.mark.parametrize("kernel_json", ['{"argv": ["x"], "display_name": "X", "language": "x"}', "[]", "{"])
def test_somebody_elses_spec_is_left_alone(command: str, kernel_json: str, prefix: Path) -> None:
    place = kernels(prefix) / "theirs"
    place.mkdir(parents=True)
    (place / "kernel.json").write_text(kernel_json)
    ended = invoked("spec", command, "--prefix", prefix, "--name", "theirs")
    assert (ended.code, ended.out) == (2, "")
    assert "is not one of hermes_kernel" in ended.err
    assert (place / "kernel.json").read_text() == kernel_json


@pytest.mark.parametrize("command", ["install", "remove"])
@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "-x", "a b", "ä", "a\n"])
def test_a_name_that_is_no_directory_of_its_own_is_refused(command: str, name: str, prefix: Path) -> None:
    kept = kernels(prefix) / "kept"
    kept.mkdir(parents=True)
    ended = invoked("spec", command, "--prefix", prefix, f"--name={name}")
    assert ended.code == 2
    assert "cannot name a kernel spec" in ended.err
    assert kept.is_dir()


@pytest.mark.parametrize("command", ["install", "remove"])
@pytest.mark.parametrize(
    "options",
    [
        ("--user", "--sys-prefix"),
        ("--user", "--prefix", "."),
        ("--sys-prefix", "--prefix", "."),
        ("--user", "--sys-prefix", "--prefix", "."),
    ],
)
def test_two_places_are_a_usage_error(command: str, options: tuple[str, ...]) -> None:
    ended = invoked("spec", command, *options)
    assert (ended.code, ended.out) == (2, "")
    assert "give one of them" in ended.err


@pytest.mark.parametrize("command", ["install", "remove"])
def test_a_prefix_that_is_missing_is_not_made(command: str, tmp_path: Path) -> None:
    ended = invoked("spec", command, "--prefix", tmp_path / "none")
    assert (ended.code, ended.out) == (2, "")
    assert "make it first" in ended.err
    assert not (tmp_path / "none").exists()


def test_a_place_that_cannot_be_written_is_one_sentence_with_a_next_step(prefix: Path) -> None:
    (prefix / "share").touch()
    ended = invoked("spec", "install", "--prefix", prefix)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("Error: the kernel spec cannot be installed in ")
    assert ended.err.endswith("choose another place with --user, --sys-prefix or --prefix\n")


@pytest.mark.parametrize("command", ["install", "remove"])
def test_without_permission_nothing_changes(
    command: str, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoked("spec", "install", "--prefix", prefix)

    def denied(*arguments: object, **options: object) -> None:  # root may write anywhere: said for the OS
        raise PermissionError(13, "Permission denied", str(prefix))

    monkeypatch.setattr(KernelSpecManager, f"{command}_kernel_spec", denied)
    ended = invoked("spec", command, "--prefix", prefix)
    assert (ended.code, ended.out) == (2, "")
    assert "Permission denied; choose another place" in ended.err
    assert sorted(path.name for path in (kernels(prefix) / "hermes").iterdir()) == sorted(FILES)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_directory_without_write_permission_is_a_sentence(prefix: Path) -> None:
    prefix.chmod(0o555)
    try:
        ended = invoked("spec", "install", "--prefix", prefix)
    finally:
        prefix.chmod(0o755)
    assert ended.code == 2
    assert "Permission denied" in ended.err


def test_jupyter_takes_the_provisioner_and_the_interpreter_from_the_installed_spec(data: Path) -> None:
    assert hermes("spec", "install").code == 0
    manager = AsyncKernelManager(kernel_name="hermes")
    spec = manager.kernel_spec
    assert spec is not None
    assert (spec.resource_dir, spec.argv[0]) == (str(data / "kernels" / "hermes"), sys.executable)
    made = KernelProvisionerFactory.instance().create_provisioner_instance("id", spec, parent=manager)
    assert isinstance(made, HermesProvisioner)


@pytest.mark.parametrize("command", [["spec"], ["spec", "install"], ["spec", "remove"]])
def test_the_help_names_the_exit_codes_and_what_the_server_needs(command: list[str]) -> None:
    ended = invoked(*command, "--help")
    assert ended.code == 0
    assert "Exit codes" in ended.out
    if command[-1] == "install":
        assert "hermes-provisioner" in ended.out


def test_the_spec_of_live_sessions_is_installed_and_removed_beside_the_other(prefix: Path) -> None:
    assert invoked("spec", "install", "--prefix", prefix).code == 0
    ended = invoked("spec", "install", "--live", "--prefix", prefix)
    place = kernels(prefix) / "hermes-live"
    assert (ended.code, str(place) in ended.out) == (0, True)
    assert sorted(path.name for path in place.iterdir()) == sorted(FILES)
    installed, published = content(place), content(PUBLISHED.with_name("hermes-live"))
    assert installed["argv"].pop(0) == sys.executable
    assert published["argv"].pop(0) == "python"
    assert installed == published
    assert installed["metadata"]["kernel_provisioner"]["provisioner_name"] == "hermes-attach"
    assert invoked("spec", "install", "--live", "--prefix", prefix).code == 0  # replaced
    ended = invoked("spec", "remove", "--live", "--prefix", prefix)
    assert (ended.code, str(place) in ended.out) == (0, True)
    assert [path.name for path in kernels(prefix).iterdir()] == ["hermes"]
    assert (
        "there is no kernel spec 'hermes-live'" in invoked("spec", "remove", "--live", "--prefix", prefix).err
    )


@pytest.mark.parametrize("options", [(), ("--user",)])
def test_a_user_gets_the_spec_of_live_sessions(options: tuple[str, ...], data: Path) -> None:
    assert invoked("spec", "install", "--live", *options).code == 0
    found = KernelSpecManager().get_kernel_spec("hermes-live")
    assert found.resource_dir == str(data / "kernels" / "hermes-live")
    assert found.display_name == "Hermes (live session of an agent)"


def test_an_environments_spec_of_live_sessions_follows_it(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(prefix))
    assert invoked("spec", "install", "--live", "--sys-prefix").code == 0
    assert content(kernels(prefix) / "hermes-live") == content(PUBLISHED.with_name("hermes-live"))
    assert invoked("spec", "remove", "--live", "--sys-prefix").code == 0


@pytest.mark.parametrize("command", ["install", "remove"])
@pytest.mark.parametrize("name", ["agent", "hermes", "hermes-live"])
def test_the_spec_of_live_sessions_has_one_name(command: str, name: str, prefix: Path) -> None:
    ended = invoked("spec", command, "--live", "--name", name, "--prefix", prefix)
    assert (ended.code, ended.out) == (2, "")
    assert "--live and --name exclude each other" in ended.err
    assert list(prefix.iterdir()) == []


@pytest.mark.parametrize("command", ["install", "remove"])
@pytest.mark.parametrize("name", ["hermes-live", "Hermes-Live"])
def test_the_name_of_live_sessions_is_no_kernels(command: str, name: str, prefix: Path) -> None:
    invoked("spec", "install", "--live", "--prefix", prefix)
    ended = invoked("spec", command, "--name", name, "--prefix", prefix)
    assert (ended.code, ended.out) == (2, "")
    assert "install it with --live" in ended.err
    assert content(kernels(prefix) / "hermes-live")["display_name"] == "Hermes (live session of an agent)"


@pytest.mark.parametrize("command", ["install", "remove"])
@pytest.mark.parametrize("other", ["somebody's", "one that starts kernels"])
def test_another_spec_of_that_name_is_left_alone(command: str, other: str, prefix: Path) -> None:
    place = kernels(prefix) / "hermes-live"
    place.mkdir(parents=True)
    starts = (PUBLISHED / "kernel.json").read_text()
    text = starts if other.startswith("one") else '{"argv": ["x"], "display_name": "X", "language": "x"}'
    (place / "kernel.json").write_text(text)
    ended = invoked("spec", command, "--live", "--prefix", prefix)
    assert (ended.code, ended.out) == (2, "")
    assert "is not one of hermes_kernel" in ended.err
    assert (place / "kernel.json").read_text() == text


def test_what_is_installed_for_live_sessions_starts_nothing(data: Path, tmp_path: Path) -> None:
    assert hermes("spec", "install", "--live").code == 0
    manager = AsyncKernelManager(kernel_name="hermes-live", connection_file=str(tmp_path / "connection.json"))

    async def main() -> None:
        with pytest.raises(ConfigError, match="attach to the kernel that runs"):
            await manager.start_kernel()
        assert isinstance(manager.provisioner, AttachProvisioner)
        assert not await manager.is_alive()
        await manager.shutdown_kernel(now=True)

    asyncio.run(main())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of this tree, built from a copy: a build leaves files beside its source."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("hermes_kernel", "kernelspec"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(out)]
    if _setuptools() >= (77,):
        command.append("--no-build-isolation")
    try:
        done = subprocess.run(
            [*command, str(source)], capture_output=True, text=True, timeout=BUILD_WAIT, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"no wheel within {BUILD_WAIT} s")
    if done.returncode != 0:
        pytest.skip(f"the wheel cannot be built here: {done.stderr.strip()[-500:]}")
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built)


def _setuptools() -> tuple[int, ...]:
    try:
        return (int(version("setuptools").split(".")[0]),)
    except PackageNotFoundError:
        return ()


def test_a_wheel_brings_the_spec_into_its_environment(wheel: zipfile.ZipFile) -> None:
    data = [name for name in wheel.namelist() if ".data/data/share/jupyter/kernels/" in name]
    assert {name.partition(".data/data/share/jupyter/kernels/")[2] for name in data} == {
        f"{spec}/{file}" for spec in SPECS for file in FILES
    }
    for name in data:
        assert wheel.read(name) == (PUBLISHED.parent / Path(name).parent.name / Path(name).name).read_bytes()


def test_a_wheel_has_what_spec_install_copies_and_the_provisioners(wheel: zipfile.ZipFile) -> None:
    for spec in SPECS:
        for file in FILES:
            packed = wheel.read(f"hermes_kernel/cli/kernels/{spec}/{file}")
            assert packed == (PUBLISHED.with_name(spec) / file).read_bytes()
    (points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert b"hermes-provisioner = hermes_kernel.host.provisioner:HermesProvisioner" in wheel.read(points)
    assert b"hermes-attach = hermes_kernel.host.attach:AttachProvisioner" in wheel.read(points)
