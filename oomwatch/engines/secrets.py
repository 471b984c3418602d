"""Secrets in command lines, variables and printed arguments: which they are, and `***` for them.

A secret is told by its name (``--api-key``, ``HF_TOKEN``, ``Authorization``), by its place in a URL
(``user:password@``), or by the shape that an issuer gives to keys (``hf_…``). Names are matched at
their end, so ``--api-key-file`` and ``hf_token_path`` are none; None, booleans and references to
variables (``$KEY``) stand as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from oomwatch.engines import launchers, shell
from oomwatch.engines.commandline import parse_command

HIDDEN: Final = "***"

# Whose token it is tells a secret from the tokens of a model: pad_token, bytes_per_token.
_ISSUERS: Final = (
    "hf|hub|hugging_?face|api|admin|access|auth|oauth|bearer|refresh|session|security|service"
    "|secret|registry|github|gitlab|gh|wandb|ngrok|vault|slack|model_?scope"
)
_NAMES: Final = (
    r"api[-_ ]?keys?",
    r"(?:access|secret|private|account|signing|encryption|(?<![a-z])auth)[-_]?keys?(?:[-_]id)?",
    r"secret|passw(?:or)?d|passphrase|credentials?|authorization|cookie",
    rf"(?<![a-z])(?:{_ISSUERS})[-_]?token",
    r"(?<=--)token",
    r"(?-i:(?<![A-Za-z])pwd|(?<=_)PWD)(?!\\*[\"']?\s{0,4}[=:]\s{0,4}[\"']?/)",  # not a directory
)
# Variables of the environment, by the end of their name.
_UPPER: Final = r"(?<=[A-Z0-9]_)(?<!PER_)(?:TOKEN|KEY|AUTH)"
_NAME: Final = rf"(?:(?i:{'|'.join(_NAMES)})|{_UPPER})(?![A-Za-z0-9_-])"

_QUOTED: Final = (
    r"""(?:\\+["'][^"'\\]*+(?:\\+["'])?|[bru]?(?:'(?:[^'\\]|\\.)*+'?|"(?:[^"\\]|\\.)*+"?))"""
)
_VALUE: Final = (
    rf"(?:(?i:bearer|basic|digest)\s+)?(?:{_QUOTED}|\[[^\]]*+\]?|\([^)]*+\)?|\w{{1,40}}+\({_QUOTED}\)?"
    r"|[^\s'\"&]++)"
)
_SECRET_NAME: Final = re.compile(_NAME + r"\Z")
_ASSIGNED: Final = re.compile(rf"({_NAME}\\*[\"']?\s{{0,4}}[=:]\s{{0,4}})({_VALUE})")
_LISTED: Final = re.compile(  # as Python prints argv and headers: '--api-key', 'a', 'b'
    rf"({_NAME}\\*[\"'],\s{{0,4}})({_QUOTED})((?:,\s{{0,4}}(?!\\*[bru]?[\"']-){_QUOTED})*)"
)
_TYPED: Final = re.compile(rf"(--(?:[\w-]{{0,40}}[-_])?{_NAME}\s+)(?!-)({_QUOTED}|\S++)")
_TYPED_MANY: Final = re.compile(  # vLLM's --api-key takes several
    rf"((?i:--api[-_]keys?)\s+)(?!-)((?:{_QUOTED}|[^\s;|]++)(?:\s+(?!-)(?:{_QUOTED}|[^\s;|]++))*+)"
)
_IN_URL: Final = re.compile(r"(?<=://)(?:([^\s/@:'\"]*):)?[^\s/'\"]+@")
_ISSUED: Final = (  # the shapes of keys, by who gives them out
    r"hf_[A-Za-z0-9]{30,}|api_org_[A-Za-z0-9]{30,}",  # Hugging Face
    r"ms-[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}",  # ModelScope
    r"sk-[\w-]{20,}|nvapi-[\w-]{20,}|gsk_[A-Za-z0-9]{32,}|xai-[A-Za-z0-9]{40,}",
    r"pplx-[A-Za-z0-9]{32,}|r8_[A-Za-z0-9]{30,}|fw_(?=[A-Za-z]*\d)[A-Za-z0-9]{20,}",
    r"[0-9a-f]{32}\.[A-Za-z0-9]{16}",  # Zhipu
    r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}",
    r"npm_[A-Za-z0-9]{30,}|pypi-AgE[\w-]{30,}",
    r"A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w.-]{20,}|dapi[a-f0-9]{32}",  # clouds
    r"LTAI[A-Za-z0-9]{12,}|AKID[A-Za-z0-9]{30,}|AKLT[A-Za-z0-9]{20,}|do[opr]_v1_[a-f0-9]{32,}",
    r"xox[abceoprs](?:\.xox[bp])?-[\w-]{10,}|xapp-[\w-]{10,}|\d{6,12}:AA[\w-]{30,}",  # chats
    r"[sr]k_(?:live|test)_[A-Za-z0-9]{16,}|shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}",  # shops
    r"SG\.[\w-]{16,}\.[\w-]{16,}|whsec_[A-Za-z0-9+/=]{24,}|NRAK-[A-Z0-9]{20,}",
    r"ATATT3[\w=-]{20,}|lin_api_[A-Za-z0-9]{30,}|ntn_[A-Za-z0-9]{30,}",
    r"hv[sbr]\.[\w-]{20,}|dp\.(?:pt|st|ct|sa)\.[A-Za-z0-9.]{30,}|AGE-SECRET-KEY-1[A-Z0-9]{30,}",
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",  # JSON Web Tokens
)
_SHAPES: Final = re.compile(
    rf"(?i:(?<=bearer\s)[\w.~+/=-]{{8,}})|(?<=wandb\slogin\s)[0-9a-f]{{40,}}|\b(?:{'|'.join(_ISSUED)})"
)
_PRIVATE_KEY: Final = re.compile(
    r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:[^-]|-(?!----))*+(?:-----END [A-Z0-9 ]{0,40}-----)?"
)
_HINT: Final = re.compile(r"(?i:key|secret|pass|pwd|credential|auth|cookie|token)")
_MANY: Final = re.compile(r"(?i:--api[-_]keys?)")
_PLAIN: Final = re.compile(r"(?i:none|null|true|false)?|\*+|\$(?:\w+|\{[^}]*\}|\([^)]*\))")
_OPENING: Final = re.compile(r"(?:(?i:bearer|basic|digest)\s+)?[\[(]?\\*(?:[bru]?[\"'])?")
_ASSIGNMENT: Final = re.compile(r"(-e|--env=)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_FLAG_BEFORE: Final = re.compile(r"--[\w-]*\Z")
_MARK: Final = re.compile(r"(?:\A|[=:/\"'])\*\*\*(?:\Z|[@\"'])")

VARIABLES: Final[Mapping[tuple[str, str], str]] = {
    ("vllm", "--api-key"): "VLLM_API_KEY",
    ("sglang", "--api-key"): "SGLANG_API_KEY",
    ("sglang", "--admin-api-key"): "SGLANG_ADMIN_API_KEY",
    ("llama.cpp", "--api-key"): "LLAMA_API_KEY",
}
"""The variable that stands for a flag's secret in a command to run; else the flag's own name."""


def is_secret(name: str) -> bool:
    """Whether what a flag, a variable or a key of this name holds is a secret."""
    return _SECRET_NAME.search(name) is not None


def hide_text(text: str) -> str:
    """A line of text with `***` for the secrets in it."""
    if _HINT.search(text):
        text = _TYPED_MANY.sub(lambda match: match[1] + _unless_plain(match[2]), text)
        for pattern in (_TYPED, _LISTED):
            text = pattern.sub(lambda match: match[1] + _masked(match[2]), text)
        text = _ASSIGNED.sub(_without_value, text)
    if "@" in text:
        text = _IN_URL.sub(lambda m: ("" if m[1] is None else f"{m[1]}:") + HIDDEN + "@", text)
    if "PRIVATE KEY" in text:
        text = _PRIVATE_KEY.sub(HIDDEN, text)
    return _SHAPES.sub(HIDDEN, text)


def hide_words(words: Sequence[str], *, version: str | None = None) -> tuple[str, ...]:
    """The words of a command with one `***` for each secret, however many words it takes."""
    ends = _secret_flags(words, version)
    script = launchers.shell_script(words)
    found: list[str] = []
    place = 0
    while place < len(words):
        word, end = words[place], ends.get(place)
        name, equals, value = word.partition("=")
        if end is None:
            found.append(_hidden_word(word, is_script=word == script))
        elif equals:
            found.append(f"{name}={_unless_plain(value)}")
        else:
            values = (_unless_plain(each) for each in words[place + 1 : end])
            found += [word, *dict.fromkeys(values)]
        place = end or place + 1
    return tuple(found)


def hide_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flags, variables or keys with their values, `***` for those that are secret by their name."""
    return {
        name: _hidden_value(value) if is_secret(name) else hide(value)
        for name, value in values.items()
    }


def hide(value: Any) -> Any:
    """Any value: the secrets in its texts, and those that a key of it names."""
    if isinstance(value, str):
        return hide_text(value)
    if isinstance(value, Mapping):
        return hide_values(value)
    if isinstance(value, tuple | list):
        return type(value)(hide(each) for each in value)
    return value


def placeholders(words: Sequence[str], engine: str | None) -> dict[int, str]:
    """The variable that stands for the `***` of a word, by the place of the word."""
    return {
        place: _variable(words, place, engine)
        for place, word in enumerate(words)
        if _MARK.search(word)
    }


def fill_in(words: Sequence[str], engine: str | None, form: str) -> list[str]:
    """The words with a reference to a variable for each `***`; `form` is such as ``${{{}}}``."""
    names = placeholders(words, engine)
    return [
        word.replace(HIDDEN, form.format(names[place])) if place in names else word
        for place, word in enumerate(words)
    ]


def shell_line(words: Sequence[str], engine: str | None) -> str:
    """The words quoted for a POSIX shell, with ``"$NAME"`` for each `***`."""
    names = placeholders(words, engine)
    return " ".join(
        _double_quoted(word, names[place]) if place in names else shell.quote([word])
        for place, word in enumerate(words)
    )


def _secret_flags(words: Sequence[str], version: str | None) -> dict[int, int]:
    """Where flags that hold a secret stand, and where their values end."""
    parsed = parse_command(words, version=version)
    ends: dict[int, int] = {}
    if parsed.argv == tuple(words):  # else it is the script of a shell, which is read as text
        for each in parsed.given:
            if is_secret(each.flag) or (each.key and is_secret(each.key)):
                ends[each.begin] = each.end
    for place, word in enumerate(words):
        if place in ends or not word.startswith("--") or not is_secret(word.partition("=")[0]):
            continue
        end = place + 1
        many = _MANY.fullmatch(word) is not None
        while (
            "=" not in word
            and end < len(words)
            and not words[end].startswith("-")
            and (many or end == place + 1)
        ):
            end += 1
        ends[place] = end
    return ends


def _hidden_word(word: str, *, is_script: bool) -> str:
    pair = _ASSIGNMENT.fullmatch(word)
    if pair is not None and is_secret(pair[2]) and not is_script:
        return f"{pair[1] or ''}{pair[2]}={_unless_plain(pair[3])}"
    return hide_text(word)


def _hidden_value(value: Any) -> Any:
    if isinstance(value, str):
        return _unless_plain(value)
    if isinstance(value, tuple | list | Mapping) and value:
        return HIDDEN
    return value


def _unless_plain(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else HIDDEN


def _without_value(match: re.Match[str]) -> str:
    if ":" in match[1] and _FLAG_BEFORE.search(
        match.string, max(0, match.start() - 60), match.start()
    ):
        return match[0]  # what argparse says of a flag: "argument --api-key: expected"
    return match[1] + _masked(match[2])


def _masked(value: str) -> str:
    """`***` in the quotes, brackets or punctuation of what stood there."""
    begin = _OPENING.match(value)
    opening = begin[0] if begin else ""
    inner = value[len(opening) :].rstrip("]),;}")
    if inner.endswith(("'", '"')):
        inner = inner[:-1].rstrip("\\")
    rest = value[len(opening) + len(inner) :]
    return value if _PLAIN.fullmatch(inner) else opening + HIDDEN + rest


def _variable(words: Sequence[str], place: int, engine: str | None) -> str:
    word = words[place]
    name, equals, value = word.partition("=")
    flag = name if equals else words[place - 1] if word == HIDDEN and place else ""
    if flag.startswith("--") and flag != "--env" and value in (HIDDEN, ""):
        flag = "--" + flag[2:].replace("_", "-")
        own = flag[2:].replace("-", "_").upper()
        return VARIABLES.get((engine or "", flag), re.sub(r"\W", "_", own))
    pair = _ASSIGNMENT.fullmatch(word)
    if pair is not None and pair[3] == HIDDEN:
        return pair[2]
    return "PASSWORD" if "://" in word else "SECRET"


def _double_quoted(word: str, name: str) -> str:
    rest = re.sub(r'([$`"\\])', r"\\\1", word)
    head, _, _ = rest.partition(HIDDEN)
    follows = rest[len(head) + len(HIDDEN) : len(head) + len(HIDDEN) + 1]
    reference = f"${{{name}}}" if follows.isalnum() or follows == "_" else f"${name}"
    quoted = rest.replace(HIDDEN, reference)
    if head and re.fullmatch(r"[\w@%+=:,./-]+=", head, re.ASCII):
        return f'{head}"{quoted[len(head) :]}"'  # NAME="$NAME" is an assignment for a shell
    return f'"{quoted}"'
