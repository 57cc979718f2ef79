"""How the keys of known kinds are written: a table, a row for each kind."""

import base64
from dataclasses import dataclass

RUN = 16
"""Length of a run of letters, digits, ``_`` and ``-`` that every shape with ``in_run`` contains."""
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
