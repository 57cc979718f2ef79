from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_kernel.process.environment import FIXED, EnvPolicy, scrub

SECRET_WORDS = (
    "KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "PASSWD",
    "AUTH", "DSN", "WEBHOOK", "CREDS", "BEARER", "APIKEY",
)  # fmt: skip
SAFE_STARTS = (
    "PATH", "HOME", "USER", "LANG", "LC_", "TERM", "TMPDIR", "TMP", "TEMP", "SHELL",
    "LOGNAME", "XDG_", "PYTHONPATH", "VIRTUAL_ENV", "CONDA",
)  # fmt: skip
HERMES_NAMES = (
    "HERMES_HOME", "HERMES_PROFILE", "HERMES_CONFIG", "HERMES_ENV", "HERMES_DELEGATED_CHILD_CONTEXT",
)  # fmt: skip
WINDOWS = (
    "SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "OS", "PROCESSOR_ARCHITECTURE",
    "NUMBER_OF_PROCESSORS", "PUBLIC", "ALLUSERSPROFILE", "PROGRAMDATA", "PROGRAMFILES",
    "PROGRAMFILES(X86)", "PROGRAMW6432", "APPDATA", "LOCALAPPDATA", "USERPROFILE", "USERDOMAIN",
    "USERNAME", "HOMEDRIVE", "HOMEPATH", "COMPUTERNAME",
)  # fmt: skip
WINDOWS_ONLY = [name for name in WINDOWS if not name.startswith(SAFE_STARTS)]
GIT_STARTS = ("GIT_AUTHOR_", "GIT_COMMITTER_")
NOTHING = EnvPolicy()


def kept(*names: str, platform: str = "linux", policy: EnvPolicy = NOTHING) -> set[str]:
    """Which of these variables a kernel would see."""
    env = {name: f"value of {name}" for name in names}
    seen = scrub(env, platform=platform, policy=policy)
    assert all(seen[name] == env[name] for name in seen)
    return set(seen)


@pytest.mark.parametrize(
    "name", ["RANDOM_X", "DATABASE_URL", "LD_PRELOAD", "PYTHONSTARTUP", "GIT_DIR", "A", "", "_"]
)
def test_an_unknown_name_is_dropped(name: str) -> None:
    assert kept(name) == set()


@pytest.mark.parametrize("start", SAFE_STARTS)
def test_a_safe_prefix_is_kept_alone_and_as_a_prefix(start: str) -> None:
    assert kept(start, start + "X") == {start, start + "X"}
    assert kept("X" + start, start.lower()) == set()


@pytest.mark.parametrize("name", ["PATH", "HOME", "USER", "LANG", "LC_ALL", "TERM", "TZ", "CONDA_PREFIX"])
def test_what_a_program_needs_is_kept(name: str) -> None:
    assert kept(name) == {name}


@pytest.mark.parametrize("name", ["TZX", "tz"])
def test_the_time_zone_is_a_name_and_not_a_prefix(name: str) -> None:
    assert kept(name) == set()


@pytest.mark.parametrize("word", SECRET_WORDS)
@pytest.mark.parametrize("shape", ["{}", "HOME_{}", "PATH{}", "XDG_{}_2", "HERMES_HOME_{}"])
def test_a_secret_word_anywhere_in_a_name_drops_it_though_it_starts_safely(word: str, shape: str) -> None:
    assert kept(shape.format(word), shape.format(word.lower()), shape.format(word.title())) == set()


@pytest.mark.parametrize("word", SECRET_WORDS)
def test_a_secret_word_drops_a_name_on_windows_too(word: str) -> None:
    assert kept(f"USERPROFILE_{word}", f"TEMP_{word}", word, platform="win32") == set()


@pytest.mark.parametrize("name", ["HOME_BYPASS_X", "XDG_COMPASS_DIR", "PATH_PASS"])
def test_pass_is_no_secret_word(name: str) -> None:
    assert kept(name) == {name}


def test_pass_does_not_make_a_name_safe() -> None:
    assert kept("BYPASS_X", "COMPASS_Y") == set()


@pytest.mark.parametrize("name", HERMES_NAMES)
def test_the_allowed_hermes_names_are_kept_exactly(name: str) -> None:
    assert kept(name) == {name}
    assert kept(name + "X", name + "_2", name.lower()) == set()


@pytest.mark.parametrize(
    "name",
    ["HERMES_BASE_URL", "HERMES_", "HERMES", "HERMES_TIMEZONE", "HERMES_RPC_SOCKET", "HERMES_KERNEL_PLAIN"],
)
def test_every_other_hermes_name_is_dropped(name: str) -> None:
    assert kept(name) == set()


@pytest.mark.parametrize("name", WINDOWS_ONLY)
def test_windows_essentials_are_kept_on_windows_alone_in_any_case(name: str) -> None:
    assert kept(name, name.title(), platform="win32") == {name, name.title()}
    assert kept(name, name.title(), platform="linux") == set()
    assert kept(name, name.title(), platform="darwin") == set()


@pytest.mark.parametrize("name", WINDOWS)
def test_every_windows_essential_is_kept_there(name: str) -> None:
    assert kept(name, platform="win32") == {name}


@pytest.mark.parametrize("name", ["SYSTEMROOTX", "XOS", "OSX", "PROGRAMFILES(ARM)", "RANDOM_X"])
def test_a_windows_essential_is_a_name_and_not_a_prefix(name: str) -> None:
    assert kept(name, platform="win32") == set()


@pytest.mark.parametrize("start", GIT_STARTS)
def test_the_identity_of_git_is_kept_though_it_looks_secret(start: str) -> None:
    assert kept(start + "NAME", start + "EMAIL", start + "DATE") == {
        start + "NAME",
        start + "EMAIL",
        start + "DATE",
    }


@pytest.mark.parametrize("word", SECRET_WORDS)
@pytest.mark.parametrize("start", GIT_STARTS)
def test_a_secret_behind_the_prefix_of_git_is_dropped(start: str, word: str) -> None:
    assert kept(start + word, f"{start}NAME_{word}", start + word.lower()) == set()


@pytest.mark.parametrize(
    "name", ["GIT_AUTHOR", "GIT_AUTHORS_NAME", "XGIT_AUTHOR_NAME", "git_author_name", "GIT_CONFIG_KEY_0"]
)
def test_only_the_prefix_of_git_itself_is_innocent(name: str) -> None:
    assert kept(name) == set()


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "RANDOM_X", "HERMES_BASE_URL"])
def test_a_declared_name_beats_every_rule(name: str) -> None:
    policy = EnvPolicy(passthrough=frozenset({name}))
    assert kept(name, name + "_2", platform="linux", policy=policy) == {name}
    assert kept(name, platform="win32", policy=policy) == {name}


def test_a_declared_name_is_kept_with_the_value_of_the_host() -> None:
    policy = EnvPolicy(passthrough=frozenset({"A_TOKEN", "ABSENT"}))
    assert scrub({"A_TOKEN": "t"}, platform="linux", policy=policy) == {"A_TOKEN": "t"}


def test_the_value_of_the_policy_replaces_that_of_the_host() -> None:
    policy = EnvPolicy(passthrough=frozenset({"A_TOKEN"}), values={"A_TOKEN": "profile"})
    assert scrub({"A_TOKEN": "global"}, platform="linux", policy=policy) == {"A_TOKEN": "profile"}


def test_a_value_that_only_the_policy_has_is_added() -> None:
    policy = EnvPolicy(passthrough=frozenset({"A_TOKEN"}), values={"A_TOKEN": "profile"})
    assert scrub({}, platform="linux", policy=policy) == {"A_TOKEN": "profile"}


def test_a_withheld_name_is_dropped_though_it_is_declared() -> None:
    policy = EnvPolicy(passthrough=frozenset({"A_TOKEN", "B"}), withheld=frozenset({"A_TOKEN"}))
    assert kept("A_TOKEN", "B", policy=policy) == {"B"}


def test_a_withheld_name_is_dropped_though_it_is_safe() -> None:
    assert kept("HOME", "PATH", policy=EnvPolicy(withheld=frozenset({"HOME"}))) == {"PATH"}


def test_the_environment_of_the_host_is_not_changed() -> None:
    env = {"HOME": "/h", "A_TOKEN": "t"}
    seen = scrub(env, platform="linux", policy=EnvPolicy(values={"HOME": "/other"}))
    assert env == {"HOME": "/h", "A_TOKEN": "t"}
    assert seen == {"HOME": "/other"}


def test_every_kernel_speaks_utf8_and_writes_no_bytecode() -> None:
    assert FIXED == {"PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"}


# Names that are near the rules, not only any text: pieces of the lists glued together.
pieces = st.one_of(
    st.sampled_from([*SECRET_WORDS, *SAFE_STARTS, *HERMES_NAMES, *WINDOWS, *GIT_STARTS, "PASS", "_", "TZ"]),
    st.text(max_size=4),
)
names = (
    st.lists(pieces, max_size=4).map("".join).flatmap(lambda n: st.sampled_from([n, n.lower(), n.title()]))
)
environments = st.dictionaries(names, st.text(max_size=5), max_size=8)
platforms = st.sampled_from(["linux", "darwin", "win32"])
policies = st.builds(
    EnvPolicy,
    passthrough=st.frozensets(names, max_size=3),
    values=st.dictionaries(names, st.text(max_size=5), max_size=2),
    withheld=st.frozensets(names, max_size=2),
)


def looks_secret(name: str) -> bool:
    for start in GIT_STARTS:
        name = name.removeprefix(start) if name.startswith(start) else name
    return any(word in name.upper() for word in SECRET_WORDS)


@given(environments, platforms, policies)
def test_no_name_with_a_secret_word_ever_passes_undeclared(
    env: dict[str, str], platform: str, policy: Any
) -> None:
    seen = scrub(env, platform=platform, policy=policy)
    assert not {n for n in seen if looks_secret(n) and n not in policy.passthrough and n not in policy.values}


@given(environments, platforms)
def test_nothing_passes_that_is_not_on_a_list(env: dict[str, str], platform: str) -> None:
    for name in scrub(env, platform=platform, policy=NOTHING):
        listed = name.startswith(SAFE_STARTS + GIT_STARTS) or name in {"TZ", *HERMES_NAMES}
        assert listed or (platform == "win32" and name.upper() in WINDOWS)


@given(environments, platforms, policies)
def test_a_scrubbed_environment_is_not_changed_by_a_second_scrub(
    env: dict[str, str], platform: str, policy: EnvPolicy
) -> None:
    once = scrub(env, platform=platform, policy=policy)
    assert scrub(once, platform=platform, policy=policy) == once


@given(environments, platforms, policies)
def test_a_withheld_value_of_the_host_never_passes(
    env: dict[str, str], platform: str, policy: EnvPolicy
) -> None:
    seen = scrub(env, platform=platform, policy=policy)
    assert not (policy.withheld & seen.keys()) - policy.values.keys()


@given(environments, platforms, policies)
def test_a_declared_name_always_passes(env: dict[str, str], platform: str, policy: EnvPolicy) -> None:
    seen = scrub(env, platform=platform, policy=policy)
    assert (policy.passthrough & env.keys()) - policy.withheld <= seen.keys()
    assert {name: seen[name] for name in policy.values} == policy.values
