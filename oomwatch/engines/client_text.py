"""What a client sent, as it turns up in a server's log: never evidence, and nobody else's business.

Request loggers print prompts and answers, validation errors echo the body they refuse, and a
gateway in the same container may print a prompt as it is, line by line.
"""

from __future__ import annotations

import re
from typing import Final

from oomwatch.records import LogLine

_ORIGINS: Final = re.compile(  # request loggers, and what reads the bodies of requests and answers
    r"(?:request_logger|logger|\w*(?:tool|reasoning)_parser|chat_utils|protocol)\.py\b"
)
_LINE: Final = re.compile(
    r"^(?:Received request |Received response|Generated response |Added request .*prompt|Request \S+ details: "
    r"|Receive: obj=|Finish: obj=|\[?\{?'?\"?(?:object|error|messages|prompt|role|content)'?\"?: ?[\"'{\[]"
    r"|Request: |request body|[Pp]rompt(?:: |=')|generate\{|(?:chat_)?completions\{"
    r"|(?:tool call|arguments|function[ _]call|tool_calls?)\b.{0,40}[:=] ?[{\[\"'])"
)
_INPUT_VALUE: Final = re.compile(r"input_value=.*?(?=, input_type=|$)", re.DOTALL)
_WHOLE_BODY: Final = re.compile(
    r"(?:^|\.)(?:RequestValidationError|HTTPException|BadRequestError|JSONDecodeError|TemplateError"
    r"|UndefinedError|TemplateSyntaxError|UnprocessableEntityError|Client\w+Error|InvalidURL)$"
)
_REPEATED: Final = re.compile(  # a server's own words, up to those of a client that it repeats
    r"The model `|were present in the request but ignored: |(?:Aborted|Added|Finished) request\S* "
    r"|Conversation roles must alternate[^:]{0,80}: "
    r"|LoRA adapter that has never been loaded: |Unknown (?:part type|modality|role): "
    r"|(?:Error in (?:detect_and_parse|parse_streaming_increment)|[Tt]ool (?:call )?parsing error"
    r"|[Ff]ailed to parse (?:JSON part|(?:tool|function)[ _]calls?|arguments)[\w ]{0,40}): "
)
_REQUEST_ID: Final = re.compile(r"""\brid=(?:'(?:[^'\\]|\\.)*+'?|"(?:[^"\\]|\\.)*+"?)""")
_REQUEST_CODE: Final = re.compile(
    r"(?:^|/)(?:vllm/(?:entrypoints/(?:chat_utils|openai/(?:\w+/)?protocol)\.py"
    r"|(?:entrypoints/openai/)?tool_parsers/|reasoning/|multimodal/(?:utils|media/\w+)\.py)"
    r"|sglang/srt/(?:function_call/|entrypoints/openai/protocol\.py|openai_api/protocol\.py)"
    r"|jinja2/|json/decoder\.py|aiohttp/)"
)
_REFUSALS: Final = frozenset({"ValueError", "TypeError", "KeyError", "NotImplementedError"})


def is_client_text(line: LogLine) -> bool:
    """Whether a client's words may stand in this line: request loggers and refused requests."""
    if line.origin is not None and _ORIGINS.match(line.origin):
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
    return without_repeated(text)


def refuses_request(name: str, path: str) -> bool:
    """Whether an exception raised in a file of this path says what is wrong with a request.

    Code that reads requests refuses them with the words it stumbled over; it allocates nothing.
    """
    return name in _REFUSALS and _REQUEST_CODE.search(path) is not None


def without_repeated(text: str) -> str:
    """A server's line without a client's words that it repeats: names of models, ids, fields."""
    match = _REPEATED.search(text)
    if match is not None:
        text = text[: match.end()] + "…"
    return _REQUEST_ID.sub("rid=…", text) if "rid=" in text else text


def without_input_values(text: str) -> str:
    """A line without the values that pydantic refused: ``input_value=…``."""
    return _INPUT_VALUE.sub("input_value=…", text) if "input_value=" in text else text
