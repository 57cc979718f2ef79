import base64
import json
import re
import time
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hermes_kernel.cell.masks import MARGIN, SHAPES, Masks, Shape, worth_masking

MASKS = Masks()
ZERO_WIDTH = "\u200b\u200c\u200d\u2060\ufeff\u00ad"
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)


def secret_of(shape: Shape) -> str:
    """What must not be readable in an example: the group of its pattern, or all that matches."""
    match = re.search(shape.pattern, shape.example)
    assert match
    return match.groupdict().get("secret") or match[0]


@each_shape
def test_a_literal_stands_in_each_example_and_the_source_is_an_address(shape: Shape) -> None:
    assert any(literal in shape.example for literal in shape.literals)
    assert shape.source.startswith("https://")


@each_shape
@pytest.mark.parametrize(
    "frame",
    [
        "{}",
        "the key is {}, do not tell",
        "KEY={}\nnext line",
        "'{}'",
        "a\t{}\tb",
        "first line\\n{}\\nthird, in repr",
        "https://example.org/?key%3D{}",
    ],
)
def test_each_example_is_masked_wherever_it_stands(shape: Shape, frame: str) -> None:
    masked = MASKS.mask(frame.format(shape.example))
    assert secret_of(shape) not in masked
    assert "***" in masked
    assert MASKS.mask(masked) == masked


@each_shape
def test_each_example_is_masked_by_its_own_shape(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_kernel.cell.masks.SHAPES", (shape,))
    assert secret_of(shape) not in MASKS.mask(f"see {shape.example} here")


@each_shape
def test_each_example_is_masked_inside_json(shape: Shape) -> None:
    document = json.dumps({"before": 1, "value": shape.example, "after": [2]})
    masked = json.loads(MASKS.mask(document))
    assert secret_of(shape) not in masked["value"]
    assert (masked["before"], masked["after"]) == (1, [2])


@each_shape
@pytest.mark.parametrize("unseen", [*ZERO_WIDTH, "\0", "\x01", "\x7f", "\x80", "\x9f", "\u200b\x02"])
def test_each_example_is_masked_with_unseen_characters_between_its_own(shape: Shape, unseen: str) -> None:
    hidden = unseen.join(shape.example)
    masked = MASKS.mask(f"see é {hidden} here")
    assert secret_of(shape) not in "".join(c for c in masked if c not in unseen)
    assert masked.startswith("see é ")
    assert masked.endswith(" here")
    assert MASKS.mask(masked) == masked


IGNORABLE = [
    0xAD, 0x34F, 0x61C, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), *range(0x200B, 0x2010),
    *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0x3164, *range(0xFE00, 0xFE10), 0xFEFF, 0xFFA0,
    *range(0xFFF0, 0xFFF9), *range(0x1BCA0, 0x1BCA4), *range(0x1D173, 0x1D17B), 0xE0000, 0xE0041, 0xE0FFF,
]  # fmt: skip


@pytest.mark.parametrize("unseen", [chr(point) for point in IGNORABLE], ids=ascii)
def test_no_character_that_is_not_drawn_saves_an_exact_value(unseen: str) -> None:
    masked = Masks(["correct-Horse7-battery"]).mask(f"é {unseen.join('correct-Horse7-battery')} é")
    assert masked == "é *** é"


@each_shape
def test_one_unseen_character_in_the_middle_does_not_save_a_part(shape: Shape) -> None:
    secret = secret_of(shape)
    middle = len(secret) // 2
    text = shape.example.replace(secret, f"{secret[:middle]}\x01{secret[middle:]}")
    masked = MASKS.mask(text)
    assert secret[middle : middle + 6] not in masked
    assert secret[middle - 6 : middle] not in masked


@pytest.mark.parametrize(
    "text",
    [
        "TOKENIZERS_PARALLELISM=false",
        "MAX_TOKENS=4096",
        "KEYBOARD_LAYOUT=us",
        "XAUTHORITY=/home/ann/.Xauthority",
        "GIT_AUTHOR_NAME=Ann",
        "commit fc7009c3d0a1b2c3d4e5f6789abcdef012345678",
        "id 123e4567-e89b-12d3-a456-426614174000",
        "import sk-learn",
        "sk-learn==1.4.2 sk-internationalization",
        "task-0123456789abcdef0123456789abcdef done",
        "disk-usage-report-2024-01-01-final",
        "risk-0123456789abcdef0123456789abcdef01234567",
        "disk-Ab3dE5gH7Ab3dE5gH7Ab3dE5gH7 X_xoxb-123456789012-123456789012",
        "SK and SKU0123456789abcdef0123456789abcdef",
        "Authorization: none, Bearer of bad news, Basic authentication",
        "a bearer characteristically-long-word-without-digits",
        "http://localhost:8080/a@b https://example.org:443/?x=a@b http://[::1]:80/",
        "ssh://git@example.org:22/repo.git",
        "docker://alpine:3.18@sha256:0123456789abcdef",
        "postgres://ann:{password}@db postgres://ann:${PASSWORD}@db postgres://ann:$PASSWORD@db",
        "postgres://ann:<password>@db postgres://ann:***@db postgres://ann:%(pw)s@db postgres://ann:%s@db",
        'if "-----BEGIN PRIVATE KEY-----" in line:\n    found.append(line)\n',
        "-----BEGIN CERTIFICATE-----\n" + "MIIEow" * 12 + "\n-----END CERTIFICATE-----",
        "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 64).decode(),
        "name\tvalue\r\n[31m\x1b[0m\u200bzero",
        "",
    ],
)
def test_ordinary_text_is_not_touched(text: str) -> None:
    assert MASKS.mask(text) == text


def test_a_long_key_keeps_its_ends_and_a_short_one_nothing() -> None:
    assert MASKS.mask("ghp_" + "ab12" * 9) == "ghp_ab***ab12"
    assert MASKS.mask("AKIA" + "Q3W5" * 4) == "***"
    assert MASKS.mask("sk-" + "a1b2c" * 4 + "!") == "***!"
    assert MASKS.mask("sk-" + "a1b2c" * 4 + "d!") == "sk-a1b***b2cd!"


def test_the_rest_of_its_word_goes_with_a_key() -> None:
    assert MASKS.mask("ghp_" + "ab12" * 9 + "-tail, and") == "ghp_ab***tail, and"


def test_only_the_password_of_a_url_is_masked() -> None:
    assert MASKS.mask("redis://:p4ss@h:1/0 a://u:p@ss#w@h") == "redis://:***@h:1/0 a://u:***@h"


def test_a_private_key_goes_from_its_header_to_its_end() -> None:
    body = "\n" + "MIIEow" * 10 + "\nshort==\n"
    block = f"-----BEGIN PRIVATE KEY-----{body}-----END PRIVATE KEY-----"
    assert MASKS.mask(f"a {block} b") == "a -----BEGIN PRIVATE KEY-----***-----END PRIVATE KEY----- b"
    assert MASKS.mask(repr(f"a {block} b")).endswith("***-----END PRIVATE KEY----- b'")


@pytest.mark.parametrize("cut", [29, 33, 60, 100, 140])
def test_a_private_key_without_its_end_goes_to_the_end_of_the_text(cut: int) -> None:
    block = "-----BEGIN PRIVATE KEY-----\n" + ("MIIEow" * 10 + "\n") * 9
    assert MASKS.mask(block[:cut]) == "-----BEGIN PRIVATE KEY-----***"


VALUES = [
    "hunter2!hunter2",
    'pass "word" \\ 1',
    "pässwörd-and-more",
    "it's a\nlong secret",
    "a/b?c=d&e+f~g h",
    "x1y2z3w4q5r6",
]


def at_offset(lead: int) -> Callable[[str], str]:
    """The base64 text of a longer value that holds the secret from byte *lead* on."""
    return lambda value: base64.b64encode(b"u:" + b"-" * lead + value.encode() + b":end").decode()


def urlsafe_at_offset(lead: int) -> Callable[[str], str]:
    return lambda value: base64.urlsafe_b64encode(b"?" * lead + value.encode() + b"??").decode()


WRITTEN: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "quote": quote,
    "quote all": lambda value: quote(value, safe=""),
    "quote_plus": quote_plus,
    "quote lower": lambda value: re.sub("%..", lambda match: match[0].lower(), quote(value)),
    "hex": lambda value: value.encode().hex(),
    "HEX": lambda value: value.encode().hex().upper(),
    "json": lambda value: json.dumps(value)[1:-1],
    "json unicode": lambda value: json.dumps(value, ensure_ascii=False)[1:-1],
    "repr": lambda value: repr(value)[1:-1],
    "repr of both quotes": lambda value: repr(value + "\"'")[1:-4],
    "bytes": lambda value: repr(value.encode())[2:-1],
}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("form", WRITTEN)
def test_an_exact_value_is_masked_in_each_way_of_writing_it(value: str, form: str) -> None:
    text = WRITTEN[form](value)
    assert Masks([value]).mask(f"<{text}>") == "<***>"
    assert Masks([value]).mask("<" + "\u200b".join(text) + ">") == "<***>"


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("lead", range(3))
@pytest.mark.parametrize("encode", [at_offset, urlsafe_at_offset])
def test_base64_of_a_longer_text_loses_the_stable_middle(
    value: str, lead: int, encode: Callable[[int], Callable[[str], str]]
) -> None:
    text = encode(lead)(value)
    before, masked, after = Masks([value]).mask(text).partition("***")
    assert masked
    assert text.startswith(before)
    assert text.endswith(after)
    assert len(text) - len(before) - len(after) >= len(value.encode()) * 8 // 6 - 2


def test_a_short_value_is_not_looked_for_in_base64() -> None:
    text = base64.b64encode(b"hunter2").decode()
    assert Masks(["hunter2"]).mask(text) == text


def test_values_too_short_to_tell_from_text_are_ignored() -> None:
    assert Masks(["", "abc", "    ", "\n"]).mask("abc     \n\n") == "abc     \n\n"
    assert Masks(["abcd"]).mask("abcd") == "***"
    assert Masks(["abcd\n"]).mask("abcd.") == "***."


def test_of_two_values_the_longer_is_masked_whole() -> None:
    for secrets in (["hunter", "hunter-two"], ["hunter-two", "hunter"]):
        assert Masks(secrets).mask("hunter-two hunter-") == "*** ***-"
    assert Masks(["abcdef", "defghi"]).mask("abcdefghi") == "***"


def test_nothing_is_shown_of_a_key_that_holds_an_exact_value() -> None:
    assert Masks(["ab12ab"]).mask("ghp_" + "ab12" * 9) == "***"


def test_a_secret_that_a_mask_completes_is_masked_too() -> None:
    assert "x***y" not in Masks(["x***y", "secret"]).mask("xsecrety")


def test_a_longer_secret_raises_the_margin() -> None:
    assert MASKS.margin == Masks(["short one"]).margin == MARGIN
    assert Masks(["k" * 100_000]).margin >= 100_000


printable = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x24F, exclude_categories=["Cc", "Cf"]), min_size=8
)
no_shape = st.text(st.sampled_from("ab1-_ .:/@\n\t\u200bé"))


@given(st.text(), st.text(), printable)
def test_an_exact_value_never_survives(before: str, after: str, secret: str) -> None:
    assume(secret.strip())
    masks = Masks([secret])
    masked = masks.mask(before + secret + after)
    assert secret not in masked
    assert masks.mask(masked) == masked


tricky = st.lists(
    st.sampled_from(
        [
            *(shape.example for shape in SHAPES),
            "sk-",
            "-",
            "a1",
            "***",
            ":",
            "@",
            "\u200b",
            "\t",
            "hunter2",
            "ghp_",
        ]
    )
).map("".join)


@given(tricky)
def test_masking_twice_changes_nothing_more(text: str) -> None:
    masks = Masks(["hunter2", "a1a1"])
    masked = masks.mask(text)
    assert masks.mask(masked) == masked
    assert "hunter2" not in masked


@given(no_shape.filter(lambda text: "://" not in text.replace("\t", "").replace("\u200b", "")))
def test_text_without_secrets_is_unchanged(text: str) -> None:
    assert Masks(["hunter2hunter2"]).mask(text) == text


@given(no_shape, no_shape, st.sampled_from(SHAPES))
def test_what_stands_around_a_key_is_kept(before: str, after: str, shape: Shape) -> None:
    masked = MASKS.mask(f"{before}\n {shape.example} \n{after}")
    assume(not shape.whole and "://" not in before + after)
    assert masked.startswith(before + "\n ")
    assert masked.endswith(" \n" + after)


@pytest.mark.parametrize(
    "value",
    [
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "hunter2-hunter2",
        "0a1b2c3d4e5f67890a1b2c3d4e5f6789",
        "/AbC3dE5gH7iJ9kL1mN3oP5qR7sT9uV1wX3yZ5a",
        "postgres://ann:made-up@db.example/app",
        "https://hooks.example.org/services/0a1b2c3d4e5f67890a1b2c",
        "correct horse battery 1",
        "p4ss:w0rd:and:more!",
    ],
)
def test_a_value_that_nobody_would_write_by_chance_is_worth_masking(value: str) -> None:
    assert worth_masking(value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        " " * 20,
        "short-1",
        "false",
        "123456789012",
        "-1234567890.125",
        "1.5e-300000000",
        "0xdeadbeefdead",
        "/home/ann/.Xauthority",
        "~/.config/app/1",
        "./build-2024/x1",
        "../build-2024/x1",
        "C:\\Users\\ann\\token1",
        "C:\\a1\\bin;D:\\b2\\tools",
        "/usr/bin:/usr/local/bin2:/opt/x1",
        "src/app/main_v2.py",
        "google/gemma-2-9b-it",
        "lib/python3.11/site-packages",
        "correct horse battery staple",
        "some-plain_setting.name",
        "https://example.org/a/b1?c=d2",
        "https://example.org/123e4567-e89b-12d3-a456-426614174000",
        "ann.smith1@example.org",
    ],
)
def test_a_setting_is_not_worth_masking(value: str) -> None:
    assert not worth_masking(value)


LINE = "2024-01-02 12:00:00,123 INFO hermes_kernel.cell.execution: request 0a1b of user_17, disk-usage ok\n"


def quickest(work: Callable[[], object]) -> float:
    """Seconds of the best of three: the others measure the machine."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def test_a_large_ordinary_text_is_searched_in_a_moment() -> None:
    text = LINE * (5_000_000 // len(LINE))
    assert MASKS.mask(text) is text
    assert quickest(lambda: MASKS.mask(text)) < 0.3  # 0.04 on a machine that does nothing else


@pytest.mark.parametrize(
    "piece",
    [
        *("a", "1", ":", "*", "-", "{", '"', "\\n", "\0", "\u200b", "s\u200bk\u200b-", "://", "a://b:c"),
        *("a://b:c@", "sk-", "ask-", "-sk-", "eyJ", "-eyJ", "eyJaaaaaaaa.", "-eyJaaaaaaaa.eyJbbbbbbbb"),
        *("ghp_", "-ghp_", "xoxb-", "glpat-", "12345678:AA", "-MT", "Bearer a", "Authorization: "),
        *("-secret_a", "-fw_a", "SK", "/api/webhooks/", "-----BEGIN "),
        *("-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----\nabc-", "- "),
    ],
)  # fmt: skip
def test_a_text_made_to_be_slow_is_not(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    start = time.perf_counter()
    masked = MASKS.mask(text)
    assert time.perf_counter() - start < 15  # under 1 on a machine that does nothing else
    assert MASKS.mask(masked) == masked
