"""Secrets in what a cell has written: how they are recognised, and the text without them."""

import base64
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from urllib.parse import quote, quote_plus

MASK = "***"
MARGIN = 64 * 1024
"""Characters: no secret is longer, except a longer exact one and a private key without its end."""

SHOWN_FROM = 24
"""Length from which a key keeps its ends, so that the reader recognises which one it was."""
SHOWN_HEAD, SHOWN_TAIL = 6, 4

SHORTEST_SECRET = 4
SHORTEST_IN_BASE64 = 12
SHORTEST_WORTH_MASKING = 12

ROUNDS = 16
"""Passes over one text. A mask can complete another secret; the second pass nearly always finds nothing."""

RUN = 16
"""Length of a run of letters, digits, ``_`` and ``-`` that every shape with ``in_run`` contains."""
LONGEST_RUN = 4096
"""Characters of a longer run without a hyphen that are searched for the beginning of a key."""

RUN_LEAD = 4
"""Characters in front of a run that may belong to the literal: ``SG.`` and ``:AA``."""


@dataclass(frozen=True)
class Shape:
    """How the secrets of one kind are written.

    A match of ``pattern`` is masked, or its group ``secret`` if there is one, where that begins a word. At
    least one of ``literals`` stands in every match. ``in_run``: a literal ends in, or right before, a run of
    at least RUN word characters, which makes it cheap to look for. ``whole``: nothing of it may be shown.
    """

    name: str
    pattern: str
    literals: tuple[str, ...]
    source: str
    example: str
    in_run: bool = True
    whole: bool = False


def _made_up(prefix: str, length: int, alphabet: str = "Ab3dE5gH7") -> str:
    """An example of a key, in no source file as a whole: scanners of repositories take it for a real one."""
    return prefix + (alphabet * length)[:length]


_HEX = "0a1b2c3d4e5f6789"
_JWT_PART = r"[A-Za-z0-9_-]"

SHAPES: tuple[Shape, ...] = (
    Shape(
        "OpenAI key",
        r"sk-(?:(?:proj|svcacct|admin|None)-[A-Za-z0-9_-]{20,512}|(?=[A-Za-z]{0,64}[0-9])[A-Za-z0-9]{20,256})",
        ("sk-",),
        "https://platform.openai.com/docs/api-reference/authentication",
        _made_up("sk-" + "proj-", 48),
    ),
    Shape(
        "Anthropic key",
        r"sk-ant-[A-Za-z0-9_-]{20,512}",
        ("sk-ant-",),
        "https://docs.anthropic.com/en/api/overview",
        _made_up("sk-" + "ant-api03-", 95),
    ),
    Shape(
        "OpenRouter key",
        r"sk-or-(?:v[0-9]-)?[A-Za-z0-9]{20,256}",
        ("sk-or-",),
        "https://openrouter.ai/docs/api-reference/authentication",
        _made_up("sk-" + "or-v1-", 64, _HEX),
    ),
    Shape(
        "Langfuse secret key",
        r"sk-lf-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
        ("sk-lf-",),
        "https://langfuse.com/faq/all/where-are-langfuse-api-keys",
        "sk-" + "lf-0a1b2c3d-4e5f-6789-0a1b-2c3d4e5f6789",
    ),
    Shape(
        "LangSmith key",
        r"lsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10}",
        ("lsv2_",),
        "https://docs.smith.langchain.com/administration/how_to_guides/organization_management/create_account_api_key",
        _made_up("lsv2_" + "pt_", 32, _HEX) + "_0a1b2c3d4e",
    ),
    Shape(
        "GitHub token",
        r"gh[pousr]_[A-Za-z0-9_]{36,512}",
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
        "https://docs.github.com/en/authentication/keeping-your-account-and-data-secure/about-authentication-to-github",
        _made_up("gh" + "p_", 36),
    ),
    Shape(
        "GitHub fine-grained token",
        r"github_pat_[A-Za-z0-9_]{36,255}",
        ("github_pat_",),
        "https://docs.github.com/en/authentication/keeping-your-account-and-data-secure/about-authentication-to-github",
        _made_up("github_" + "pat_", 82),
    ),
    Shape(
        "GitLab token",
        r"gl(?:pat|oas|dt|rt|rtr|cbt|ptt|ft|imt|agent|wt|soat|ffct)-[A-Za-z0-9_-]{20,300}(?:\.[0-9a-z]{2}\.[0-9a-z]{9})?",
        ("gl",),
        "https://docs.gitlab.com/security/tokens/#token-prefixes",
        _made_up("gl" + "pat-", 20),
    ),
    Shape(
        "Slack token",
        r"xox[a-z]-[A-Za-z0-9-]{16,255}",
        ("xox",),
        "https://docs.slack.dev/authentication/tokens",
        "xox" + "b-123456789012-123456789012-" + _made_up("", 24),
    ),
    Shape(
        "Slack app token",
        r"xapp-[A-Za-z0-9-]{16,255}",
        ("xapp-",),
        "https://docs.slack.dev/authentication/tokens",
        "xapp" + "-1-A0123456789-123456789012-" + _made_up("", 64, _HEX),
    ),
    Shape(
        "Slack webhook",
        r"hooks\.slack\.com/(?:services|workflows|triggers)/[A-Za-z0-9]{1,32}/[A-Za-z0-9]{1,32}/(?P<secret>[A-Za-z0-9/]{16,64})",
        ("hooks.slack.com/",),
        "https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks",
        "https://hooks.slack.com/" + "services/T0123456/B0123456/" + _made_up("", 24),
        in_run=False,
    ),
    Shape(
        "AWS access key id",
        r"A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])",
        ("AKIA", "ASIA"),
        "https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html#identifiers-prefixes",
        _made_up("AK" + "IA", 16, "Q3W5E7"),
    ),
    Shape(
        "Google API key",
        r"AIza[A-Za-z0-9_-]{35}",
        ("AIza",),
        "https://cloud.google.com/docs/authentication/api-keys",
        _made_up("AI" + "zaSy", 33),
    ),
    Shape(
        "Google OAuth client secret",
        r"GOCSPX-[A-Za-z0-9_-]{28}",
        ("GOCSPX-",),
        "https://developers.google.com/identity/protocols/oauth2",
        _made_up("GOC" + "SPX-", 28),
    ),
    Shape(
        "Google access token",
        r"ya29\.[A-Za-z0-9_-]{20,2048}",
        ("29.",),
        "https://cloud.google.com/docs/authentication/token-types",
        _made_up("ya" + "29.", 120),
    ),
    Shape(
        "Stripe key",
        r"[rs]k_(?:live|test)_[A-Za-z0-9]{10,255}",
        ("k_live_", "k_test_"),
        "https://docs.stripe.com/keys",
        _made_up("sk_" + "live_", 24),
    ),
    Shape(
        "Stripe webhook secret",
        r"whsec_[A-Za-z0-9]{20,255}",
        ("whsec_",),
        "https://docs.stripe.com/webhooks",
        _made_up("wh" + "sec_", 32),
    ),
    Shape(
        "SendGrid key",
        r"SG\.[A-Za-z0-9_-]{16,32}\.[A-Za-z0-9_-]{16,64}",
        ("SG.",),
        "https://www.twilio.com/docs/sendgrid/ui/account-and-settings/api-keys",
        _made_up("SG" + ".", 22) + "." + _made_up("", 43),
    ),
    Shape(
        "Twilio API key",
        r"SK[0-9a-f]{32}(?![A-Za-z0-9])",
        ("SK",),
        "https://www.twilio.com/docs/iam/api-keys",
        _made_up("S" + "K", 32, _HEX),
    ),
    Shape(
        "npm token",
        r"npm_[A-Za-z0-9]{36,64}",
        ("npm_",),
        "https://docs.npmjs.com/about-access-tokens",
        _made_up("np" + "m_", 36),
    ),
    Shape(
        "PyPI token",
        r"pypi-A[A-Za-z0-9_-]{50,512}",
        ("pypi-A",),
        "https://pypi.org/help/#apitoken",
        _made_up("py" + "pi-AgEIcHlwaS5vcmc", 80),
    ),
    Shape(
        "Hugging Face token",
        r"hf_[A-Za-z0-9]{30,64}",
        ("hf_",),
        "https://huggingface.co/docs/hub/security-tokens",
        _made_up("h" + "f_", 34),
    ),
    Shape(
        "Telegram bot token",
        r":(?<=[0-9]{8}:)(?P<secret>AA[A-Za-z0-9_-]{32,34})(?![A-Za-z0-9_-])",
        (":AA",),
        "https://core.telegram.org/bots/api#authorizing-your-bot",
        _made_up("1234567890:" + "AA", 33),
    ),
    Shape(
        "Discord bot token",
        r"(?:[MN][DTjz]|O[DT])[A-Za-z0-9_-]{22,26}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,40}",
        ("MD", "MT", "Mj", "Mz", "ND", "NT", "Nj", "Nz", "OD", "OT"),
        "https://discord.com/developers/docs/reference#authentication",
        _made_up("M" + "T", 24) + ".Ab3dE5." + _made_up("", 38),
    ),
    Shape(
        "Discord webhook",
        r"/api/webhooks/[0-9]{17,20}/(?P<secret>[A-Za-z0-9_-]{60,80})",
        ("/api/webhooks/",),
        "https://discord.com/developers/docs/resources/webhook",
        "https://discord.com/api/" + "webhooks/123456789012345678/" + _made_up("", 68),
        in_run=False,
    ),
    Shape(
        "DigitalOcean token",
        r"do[opr]_v1_[0-9a-f]{64}",
        ("dop_v1_", "doo_v1_", "dor_v1_"),
        "https://docs.digitalocean.com/reference/api/create-personal-access-token/",
        _made_up("do" + "p_v1_", 64, _HEX),
    ),
    Shape(
        "Shopify token",
        r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}",
        ("shpat_", "shpca_", "shppa_", "shpss_"),
        "https://shopify.dev/docs/apps/build/authentication-authorization",
        _made_up("shp" + "at_", 32, _HEX),
    ),
    Shape(
        "Groq key",
        r"gsk_[A-Za-z0-9]{40,64}",
        ("gsk_",),
        "https://console.groq.com/docs/quickstart",
        _made_up("g" + "sk_", 52),
    ),
    Shape(
        "Cerebras key",
        r"csk-[A-Za-z0-9]{40,64}",
        ("csk-",),
        "https://inference-docs.cerebras.ai/quickstart",
        _made_up("c" + "sk-", 48),
    ),
    Shape(
        "Perplexity key",
        r"pplx-[A-Za-z0-9]{40,64}",
        ("pplx-",),
        "https://docs.perplexity.ai/getting-started/quickstart",
        _made_up("pp" + "lx-", 48),
    ),
    Shape(
        "xAI key",
        r"xai-[A-Za-z0-9]{40,128}",
        ("xai-",),
        "https://docs.x.ai/docs/tutorial",
        _made_up("x" + "ai-", 80),
    ),
    Shape(
        "Replicate token",
        r"r8_[A-Za-z0-9]{30,64}",
        ("r8_",),
        "https://replicate.com/docs/topics/security/api-tokens",
        _made_up("r" + "8_", 37),
    ),
    Shape(
        "Fireworks key",
        r"fw_(?=[A-Za-z]{0,64}[0-9])[A-Za-z0-9]{20,64}",
        ("fw_",),
        "https://docs.fireworks.ai/getting-started/quickstart",
        _made_up("f" + "w_", 24),
    ),
    Shape(
        "NVIDIA key",
        r"nvapi-[A-Za-z0-9_-]{40,100}",
        ("nvapi-",),
        "https://docs.api.nvidia.com/nim/docs/api-quickstart",
        _made_up("nv" + "api-", 64),
    ),
    Shape(
        "Tavily key",
        r"tvly-(?:dev-|prod-)?[A-Za-z0-9]{20,64}",
        ("tvly-",),
        "https://docs.tavily.com/documentation/api-reference/introduction",
        _made_up("tv" + "ly-", 32),
    ),
    Shape(
        "Firecrawl key",
        r"fc-[0-9a-f]{32}(?![A-Za-z0-9])",
        ("fc-",),
        "https://docs.firecrawl.dev/api-reference/introduction",
        _made_up("f" + "c-", 32, _HEX),
    ),
    Shape(
        "Pinecone key",
        r"pcsk_[A-Za-z0-9_]{40,128}",
        ("pcsk_",),
        "https://docs.pinecone.io/guides/projects/manage-api-keys",
        _made_up("pc" + "sk_", 70),
    ),
    Shape(
        "E2B key",
        r"e2b_[0-9a-f]{40}(?![A-Za-z0-9])",
        ("e2b_",),
        "https://e2b.dev/docs/api-key",
        _made_up("e2" + "b_", 40, _HEX),
    ),
    Shape(
        "Databricks token",
        r"dapi[0-9a-f]{32}(?:-[0-9])?(?![A-Za-z0-9])",
        ("dapi",),
        "https://docs.databricks.com/aws/en/dev-tools/auth/pat",
        _made_up("da" + "pi", 32, _HEX),
    ),
    Shape(
        "Linear key",
        r"lin_(?:api|oauth)_[A-Za-z0-9]{32,64}",
        ("lin_api_", "lin_oauth_"),
        "https://linear.app/developers/graphql",
        _made_up("lin_" + "api_", 40),
    ),
    Shape(
        "Notion token",
        r"(?:ntn_[A-Za-z0-9]{40,64}|secret_(?=[A-Za-z]{0,64}[0-9])[A-Za-z0-9]{43})(?![A-Za-z0-9])",
        ("ntn_", "secret_"),
        "https://developers.notion.com/reference/authentication",
        _made_up("nt" + "n_", 46),
    ),
    Shape(
        "Vault token",
        r"hv[bsr]\.[A-Za-z0-9_-]{24,300}",
        ("hvs.", "hvb.", "hvr."),
        "https://developer.hashicorp.com/vault/docs/concepts/tokens",
        _made_up("hv" + "s.", 90),
    ),
    Shape(
        "Grafana service account token",
        r"glsa_[A-Za-z0-9]{32}_[0-9a-fA-F]{8}",
        ("glsa_",),
        "https://grafana.com/docs/grafana/latest/administration/service-accounts/",
        _made_up("gl" + "sa_", 32) + "_0a1b2c3d",
    ),
    Shape(
        "Sentry token",
        r"sntryu_[0-9a-f]{64}",
        ("sntryu_",),
        "https://docs.sentry.io/account/auth-tokens/",
        _made_up("sntr" + "yu_", 64, _HEX),
    ),
    Shape(
        "Figma token",
        r"figd_[A-Za-z0-9_-]{40,64}",
        ("figd_",),
        "https://www.figma.com/developers/api#access-tokens",
        _made_up("fi" + "gd_", 40),
    ),
    Shape(
        "Supabase token",
        r"(?:sbp_[0-9a-f]{40}|sb_secret_[A-Za-z0-9_-]{22,64})",
        ("sbp_", "sb_secret_"),
        "https://supabase.com/docs/guides/api/api-keys",
        _made_up("sb" + "p_", 40, _HEX),
    ),
    Shape(
        "Postman key",
        r"PMAK-[0-9a-f]{24}-[0-9a-f]{34}",
        ("PMAK-",),
        "https://learning.postman.com/docs/developer/postman-api/authentication/",
        _made_up("PM" + "AK-", 24, _HEX) + "-" + _made_up("", 34, _HEX),
    ),
    Shape(
        "Atlassian token",
        r"ATATT3[A-Za-z0-9_=-]{100,300}",
        ("ATATT3",),
        "https://support.atlassian.com/atlassian-account/docs/manage-api-tokens-for-your-atlassian-account/",
        _made_up("AT" + "ATT3x", 180),
    ),
    Shape(
        "age secret key",
        r"AGE-SECRET-KEY-1[AC-HJ-NP-Z02-9]{58}",
        ("AGE-SECRET-KEY-1",),
        "https://github.com/C2SP/C2SP/blob/main/age.md",
        _made_up("AGE-" + "SECRET-KEY-1", 58, "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L"),
    ),
    Shape(
        "JSON Web Token",
        # Possessive: a run without a dot is read once, not once for each of its lengths.
        rf"eyJ{_JWT_PART}{{8,512}}+\.eyJ{_JWT_PART}{{8,16384}}+\.{_JWT_PART}{{16,2048}}",
        ("eyJ",),
        "https://www.rfc-editor.org/rfc/rfc7519",
        _made_up("ey" + "J", 33) + "." + _made_up("ey" + "J", 60) + "." + _made_up("", 43),
    ),
    Shape(
        "Authorization header",
        r"(?:uthorization|UTHORIZATION)\\{0,2}[\"']?\s{0,4}[:=,]\s{0,4}\\{0,2}[\"']?"
        r"(?i:bearer|basic|token|bot)\s{1,4}(?P<secret>[A-Za-z0-9._~+/-]{4,16384}={0,2})",
        ("uthorization", "UTHORIZATION"),
        "https://www.rfc-editor.org/rfc/rfc9110#name-authorization",
        "Authorization: " + "Basic " + base64.b64encode(b"ann:made-up words").decode(),
        in_run=False,
        whole=True,
    ),
    Shape(
        "bearer token",
        r"[Bb]earer\s{1,4}(?P<secret>(?=[A-Za-z._~+/-]{0,64}[0-9])[A-Za-z0-9._~+/-]{20,16384}={0,2})",
        ("earer",),
        "https://www.rfc-editor.org/rfc/rfc6750#section-2.1",
        _made_up("Bearer ", 40),
        in_run=False,
    ),
    Shape(
        "password in a URL",
        # Not a template, and not the tag of an image that is followed by its digest.
        r"://(?<=[A-Za-z0-9]://)[^\s:/?#@\[\]<>\"'`\\|]{0,256}:"
        r"(?!(?:\$?\{[^{}\s]{0,64}\}{1,2}|\$\(?\w{1,64}\)?|%(?:\(\w{1,64}\))?s|<[^<>\s]{0,64}>|\*{1,64}|\.{3}|…)@)"
        r"(?P<secret>[^\s/\"'`<>\\]{1,512})@(?!sha(?:256|512):)(?=[\w\[.%$-])",
        ("://",),
        "https://www.rfc-editor.org/rfc/rfc3986#section-3.2.1",
        "postgresql:" + "//ann:made-up!word@db.example/app",
        in_run=False,
        whole=True,
    ),
    Shape(
        "private key",
        # A block, or what is left of one: without its end, to the end of the text. A header that is merely
        # mentioned has no key behind it.
        r"-----BEGIN (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----(?P<secret>"
        r"(?=(?:(?!-----)[\s\S]){0,60}?(?:[A-Za-z0-9+/=]{16}|Proc-Type:|Version:|Comment:)"
        r"|(?:\\[nr]|[\s>|]){0,16}[A-Za-z0-9+/=]{1,15}\s{0,2}\Z)"
        r"(?:[^-]++|-(?!----))++"
        r"|(?:[^-]{1,2048}+|-(?!----)){1,64}+(?=-----END))",
        ("-----BEGIN ",),
        "https://www.rfc-editor.org/rfc/rfc7468",
        "-----BEGIN PRIVATE" + f" KEY-----\n{'MIIEow' * 12}\n{'Ab3dE5' * 9}==\n-----END PRIVATE KEY-----",
        in_run=False,
        whole=True,
    ),
)  # fmt: skip


@dataclass(frozen=True, order=True)
class _Span:
    """Where something to mask stands, and whether nothing of it may be shown."""

    start: int
    end: int
    is_whole: bool


class Masks:
    """Finds the keys of known shapes and the exact values of *secrets*, and masks them.

    ``margin``: no secret is longer, except a private key whose end is missing.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        needles = {needle for secret in secrets for needle in _written_forms(secret)}
        self._needles = sorted(needles, key=lambda needle: (-len(needle), needle))
        self.margin = max([MARGIN, *map(len, needles)])

    def mask(self, text: str) -> str:
        """*text* without its secrets; masking the result again changes nothing."""
        for _ in range(ROUNDS):
            masked = _replace(text, self._spans(text))
            if masked == text:
                break
            text = masked
        return text

    def _spans(self, text: str) -> list[_Span]:
        sketch = _sketch(text)
        spans = list(self._found(text, sketch, self._needles))
        if b"\0" in sketch or (not text.isascii() and _UNSEEN.search(text)):
            spans += self._found_between_unseen(text)
        return _merged(spans)

    def _found_between_unseen(self, text: str) -> Iterator[_Span]:
        """What is found once the characters that nobody sees are out, at its place in *text*."""
        seen = _seen(text)
        gaps: list[int] = []
        needles = [needle for needle in map(_seen, self._needles) if len(needle) >= SHORTEST_SECRET]
        for span in self._found(seen, _sketch(seen), needles):
            gaps = gaps or [match.start() - index for index, match in enumerate(_UNSEEN.finditer(text))]
            last = span.end - 1
            yield _Span(
                span.start + bisect_right(gaps, span.start),
                last + bisect_right(gaps, last) + 1,
                span.is_whole,
            )

    def _found(self, text: str, sketch: bytes, needles: list[str]) -> Iterator[_Span]:
        runs = _runs(text, sketch)
        beginnings = _beginnings(runs)
        for shape in SHAPES:
            place = beginnings if shape.in_run else text
            if place and any(literal in place for literal in shape.literals):
                yield from _matches(shape, text)
        for needle in needles:
            if needle in (runs if _RUN_ONLY.fullmatch(needle) else text):
                yield from _occurrences(needle, text)


def worth_masking(value: str) -> bool:
    """Whether the exact *value* of a variable that was withheld is a secret rather than a setting."""
    value = value.strip()
    if len(value) < SHORTEST_WORTH_MASKING or _is_number(value):
        return False
    if _WORDS.fullmatch(value) or _EMAIL.fullmatch(value):
        return False
    if _URL.match(value):
        return _URL_WITH_PASSWORD.match(value) is not None or _holds_random(value)
    return not any(all(map(_is_path, value.split(separator))) for separator in (":", ";", "\0"))


# Characters that a reader does not see, but that stand between those of a secret.
_UNSEEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u00ad\u200b-\u200d\u2060\ufeff]")

_WORD_CHARACTERS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_CONTROLS = frozenset({*range(0x20), 0x7F} - {ord("\n")})
_SKETCH = bytes(ord("x") if c in _WORD_CHARACTERS else 0 if c in _CONTROLS else ord(" ") for c in range(256))
_SHORTEST_RUN = b"x" * RUN
_LONG_RUN = re.compile(_SHORTEST_RUN + b"x*")
_REST_OF_KEY = re.compile(r"[A-Za-z0-9_-]+")
_REST_OF_WORD = re.compile(r"[A-Za-z0-9_]+")
_RUN_ONLY = re.compile(rf"[A-Za-z0-9_-]{{{RUN},}}")

# In repr, JSON and URLs a word can follow an escape that ends in a letter or a digit.
_ESCAPE = re.compile(r"(?:\\[abfnrtv0]|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|%[0-9A-Fa-f]{2})\Z")
_LONGEST_ESCAPE = 6

_WORDS = re.compile(r"[^\W\d_]+(?:[-_. ]+[^\W\d_]+)*[-_. ]*")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_URL_WITH_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#@]*:[^/?#]+@")
_ROOTED = re.compile(r"~|\.{0,2}/|[A-Za-z]:[\\/]|\\\\")
_NAME_WORD = r"(?:[A-Z]?[a-z]+(?:[A-Z][a-z]+){0,3}[0-9]{0,4}|[A-Z]+[0-9]{0,4}|[0-9]+[a-z]{0,2})"
_NAME = rf"[-_.+@ ]*{_NAME_WORD}(?:[-_.+@ ]+{_NAME_WORD})*[-_.+@ ]*"
_NAMES = re.compile(rf"{_NAME}(?:[/\\]{_NAME})+[/\\]?")
_BASE64 = re.compile(r"[A-Za-z0-9+/]{27,}={0,2}")
_PIECES = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def _written_forms(secret: str) -> set[str]:
    """The ways in which programs write *secret*; none for a value too short to tell from ordinary text."""
    value = secret.strip() if len(secret.strip()) >= SHORTEST_SECRET else secret
    if len(value) < SHORTEST_SECRET or not value.strip():
        return set()
    raw = value.encode("utf-8", "surrogatepass")
    percent = {quote(raw), quote(raw, safe=""), quote_plus(raw)}
    forms = {
        value,
        *percent,
        *(re.sub("%..", lambda match: match[0].lower(), form) for form in percent),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        repr(value)[1:-1],
        repr(raw)[2:-1],
        # Beside a double quote, repr escapes the single ones.
        repr(value + "'\"")[1:-4],
        repr(raw + b"'\"")[2:-4],
        raw.hex(),
        raw.hex().upper(),
    }
    if len(raw) >= SHORTEST_IN_BASE64:
        for lead in range(3):
            text = base64.b64encode(b"\0" * lead + raw).decode()
            # The characters that depend on this value alone, whatever stands before and after it.
            stable = text[-(-lead * 8 // 6) : (lead + len(raw)) * 8 // 6]
            forms |= {stable, stable.replace("+", "-").replace("/", "_")}
    return forms


def _sketch(text: str) -> bytes:
    """*text* as one byte a character: ``x`` of a word, NUL for a control character, else a space."""
    return text.encode("ascii", "replace").translate(_SKETCH)


def _runs(text: str, sketch: bytes) -> str:
    """The long words of *text*, where nearly every key must be: far less to search than the whole."""
    if _SHORTEST_RUN not in sketch:
        return ""
    runs = {text[max(0, match.start() - RUN_LEAD) : match.end()] for match in _LONG_RUN.finditer(sketch)}
    return "\n".join(runs)


def _beginnings(runs: str) -> str:
    """Where a key can begin in long words: at their beginning, or behind a hyphen."""
    if len(runs) < LONGEST_RUN:
        return runs
    return "\n".join(run if "-" in run else run[:LONGEST_RUN] for run in runs.split("\n"))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _matches(shape: Shape, text: str) -> Iterator[_Span]:
    pattern = _compiled(shape.pattern)
    group: str | int = "secret" if "secret" in pattern.groupindex else 0
    match = pattern.search(text)
    while match:
        start, end = match.span(group)
        if _begins_word(text, start):
            # The rest of its word goes with a key: cut off from it, the rest could be taken for another.
            end = end if shape.whole else _end_of(_REST_OF_KEY, text, end)
            yield _Span(start, end, shape.whole or end - start < SHOWN_FROM)
        else:
            end = _end_of(_REST_OF_WORD, text, match.start() + 1)
        match = pattern.search(text, end)


def _begins_word(text: str, at: int) -> bool:
    before = text[max(0, at - _LONGEST_ESCAPE) : at]
    return not before or not (before[-1].isalnum() or before[-1] == "_") or _ESCAPE.search(before) is not None


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _occurrences(needle: str, text: str) -> Iterator[_Span]:
    at = text.find(needle)
    while at >= 0:
        yield _Span(at, at + len(needle), is_whole=True)
        at = text.find(needle, at + len(needle))


def _seen(text: str) -> str:
    if text.isascii():  # three times as fast
        return text.encode().translate(None, bytes(_CONTROLS)).decode()
    return _UNSEEN.sub("", text)


def _merged(spans: list[_Span]) -> list[_Span]:
    """*spans* in order, those that overlap as one: of these nothing is shown if that holds for any."""
    merged: list[_Span] = []
    for span in sorted(spans):
        last = merged[-1] if merged else None
        if last and (span.start < last.end or (span.start == last.end and span.is_whole and last.is_whole)):
            merged[-1] = _Span(last.start, max(last.end, span.end), last.is_whole or span.is_whole)
        else:
            merged.append(span)
    return merged


def _replace(text: str, spans: list[_Span]) -> str:
    if not spans:
        return text
    pieces, done = [], 0
    for span in spans:
        pieces.append(text[done : span.start])
        pieces.append(MASK if span.is_whole else _with_ends(_seen(text[span.start : span.end])))
        done = span.end
    return "".join([*pieces, text[done:]])


def _with_ends(key: str) -> str:
    return key[:SHOWN_HEAD] + MASK + key[-SHOWN_TAIL:]


def _is_number(value: str) -> bool:
    for read in (float, lambda text: int(text, 0)):
        try:
            read(value)
        except ValueError:
            continue
        return True
    return False


def _is_path(value: str) -> bool:
    if _BASE64.fullmatch(value) and _looks_random(value):
        return False
    if not value or _ROOTED.match(value):
        return True
    return _NAMES.fullmatch(value) is not None


def _holds_random(url: str) -> bool:
    """Whether a part of *url* is a key: that of a webhook, or the user of a DSN."""
    parts = re.findall(r"[A-Za-z0-9_-]{20,}", url)
    return any(_looks_random(part) and not _UUID.fullmatch(part) for part in parts)


def _looks_random(text: str) -> bool:
    """Whether letters, capitals and digits alternate more often than in names: pieces shorter than three."""
    pieces = _PIECES.findall(text)
    return len(pieces) > 3 and sum(map(len, pieces)) < 3 * len(pieces)
