"""What a client sent, as it turns up in a server's log: never evidence, and nobody else's business.

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


def client_head(text: str) -> str:
    """How a line of a client's words begins, up to those: ``Received request ``; may be empty."""
    match = _LINE.match(text)
    return match[0] if match else ""


def without_echo(name: str, text: str) -> str:
    """The message of an exception without what it repeats of a request's body."""
    if _WHOLE_BODY.search(name):
        return ""
    if name.endswith("ValidationError"):
        return without_input_values(text)
    return text


def without_input_values(text: str) -> str:
    """A line without the values that pydantic refused: ``input_value=…``."""
    return _INPUT_VALUE.sub("input_value=…", text) if "input_value=" in text else text
