from typing import Any

import pytest

from hermes_kernel import ConfigError
from hermes_kernel.cell.masks import Masks
from hermes_kernel.host.cleaning import checked_secrets, cleaner_for
from hermes_kernel.process.environment import EnvPolicy

KEY = "ghp_" + "a1B2c3D4e5" * 3 + "F6g7H8"
ENV = {
    "OPENAI_API_KEY": "correct-Horse7-battery",
    "MY_TOKEN": "passed-Through-9-on",
    "TOKENIZERS_PARALLELISM": "false",
    "MAX_TOKENS": "4096",
    "KEYBOARD_LAYOUT": "us",
    "XAUTHORITY": "/home/ann/.Xauthority",
    "GIT_AUTHOR_NAME": "Ann of Green Gables",
    "PATH": "/usr/bin:/bin",
}
POLICY = EnvPolicy(frozenset({"MY_TOKEN"}))


def cleaner(**more: Any) -> Any:
    arguments: dict[str, Any] = {"secrets": frozenset(), "env": ENV, "policy": POLICY, "clean": None}
    return cleaner_for(**(arguments | more), platform="linux")


def test_the_values_that_are_withheld_are_masked_and_no_others() -> None:
    mask = cleaner().mask
    assert mask(f"a {ENV['OPENAI_API_KEY']} b") == "a *** b"
    for name in ENV.keys() - {"OPENAI_API_KEY"}:
        text = f"{name}={ENV[name]}"
        assert mask(text) == text
    withheld = EnvPolicy(frozenset({"MY_TOKEN"}), withheld=frozenset({"MY_TOKEN"}))
    assert ENV["MY_TOKEN"] not in cleaner(policy=withheld).mask(ENV["MY_TOKEN"])


def test_the_masks_of_equal_secrets_are_made_once() -> None:
    assert cleaner() is cleaner()
    assert cleaner(secrets=frozenset({"abcd"})) is not cleaner()


def test_the_function_of_the_host_extends_or_decides() -> None:
    extended = cleaner(clean=lambda text: text.replace("b", "B"))
    assert extended.mask(f"ab {KEY}").startswith("aB ghp_a1***")
    assert cleaner(clean=lambda text, mask: text.upper()).mask(f"ab {KEY}") == f"AB {KEY.upper()}"
    assert cleaner(clean=lambda text, mask: mask(text) + "!").mask("ab") == "ab!"
    assert extended.margin == Masks().margin
    assert extended.mask("") == ""


@pytest.mark.parametrize("broken", [lambda text: None, lambda text: 1 / 0, lambda text, mask: b"x"])
def test_one_that_fails_leaves_our_own_masks(broken: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert KEY not in cleaner(clean=broken).mask(f"ab {KEY}")
    assert cleaner(clean=broken).mask("ab") == "ab"
    assert "our own masks are used" in caplog.text


@pytest.mark.parametrize("given", ["text", b"text", 3, [3], ["abc"], ["   a "], [None]])
def test_what_is_no_secret_is_refused_and_not_shown(given: Any) -> None:
    with pytest.raises(ConfigError, match="secrets") as caught:
        checked_secrets(given)
    assert "abc" not in str(caught.value)


def test_secrets_are_taken_from_any_collection() -> None:
    assert checked_secrets(iter(["abcd", "abcd"])) == frozenset({"abcd"})
