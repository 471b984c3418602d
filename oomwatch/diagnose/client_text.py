"""What a client sent, as it turns up in a server's log: never evidence of anything.

Request loggers print prompts and answers, validation errors echo the body they refuse, and a
gateway in the same container may print a prompt as it is, line by line.
"""

from __future__ import annotations

import re
from typing import Final

from oomwatch.records import LogLine

_ORIGINS: Final = ("request_logger.py", "logger.py:")
_LINE: Final = re.compile(
    r"^(?:Received request |Received response|Generated response |Added request .*prompt|Request \S+ details: "
    r"|Receive: obj=|Finish: obj=|\[?\{?'?\"?(?:object|error|messages|prompt|role|content)'?\"?: ?[\"'{\[]"
    r"|Request: |request body|[Pp]rompt(?:: |=')|generate\{|(?:chat_)?completions\{"
    r"|(?:tool call|arguments|function[ _]call|tool_calls?)\b.{0,40}[:=] ?[{\[\"'])"
)
_AFTER_SPAN: Final = re.compile(r".*\}(?::\w+)*: [\w:]+: (\S+\.rs:\d+: .*)$")
_ACCESS: Final = re.compile(
    r'"(?:GET|POST|PUT|DELETE|HEAD|OPTIONS|PATCH) /\S* HTTP/[\d.]+" (\d{3})'
)
_INPUT_VALUE: Final = re.compile(r"input_value=.*?(?=, input_type=|$)", re.DOTALL)
_WHOLE_BODY: Final = re.compile(
    r"(?:^|\.)(?:RequestValidationError|HTTPException|BadRequestError|JSONDecodeError|TemplateError"
    r"|UndefinedError|TemplateSyntaxError|UnprocessableEntityError)$"
)


def is_client_text(line: LogLine) -> bool:
    """Whether a client's words may stand in this line: request loggers and refused requests."""
    if line.origin is not None and line.origin.startswith(_ORIGINS):
        return True
    return _LINE.match(line.text) is not None


def own_words(text: str) -> str | None:
    """What TGI's router itself says after the spans that hold a request, or None."""
    match = _AFTER_SPAN.search(text)
    return match[1] if match else None


def access_status(text: str) -> int | None:
    """The HTTP status of an access line, or None for any other line."""
    match = _ACCESS.search(text)
    return int(match[1]) if match else None


def without_echo(name: str, text: str) -> str:
    """The message of an exception without what it repeats of a request's body."""
    if _WHOLE_BODY.search(name):
        return ""
    if name.endswith("ValidationError"):
        return _INPUT_VALUE.sub("input_value=…", text)
    return text
