"""Gets the bytes of a metrics page: over HTTP, or from a saved file, plain or gzip.

The other side may be hung, hostile or not a metrics endpoint at all: time and size are capped,
redirects are not followed (a page must not send us elsewhere), and proxies and ``.netrc`` of the
environment are not used, for the address is one of this host or cluster.
"""

from __future__ import annotations

import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit, urlunsplit

from oomwatch.errors import (
    NoDataError,
    PermissionDeniedError,
    SourceError,
    SourceUnavailable,
    UsageError,
)

if TYPE_CHECKING:
    import requests

_BLOCK_BYTES: Final = 64 * 1024
_GZIP_MAGIC: Final = b"\x1f\x8b"


def is_url(source: str) -> bool:
    """Whether a source is an address rather than a path."""
    return source.lower().startswith(("http://", "https://"))


def metrics_url(url: str) -> str:
    """The address with ``/metrics`` where it names no path."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{url!r}: not an address: {error}") from None
    return urlunsplit(parts._replace(path="/metrics")) if parts.path in {"", "/"} else url


def shown_url(url: str) -> str:
    """The address without user name and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def read_file(path: str, max_bytes: int) -> bytes:
    """The bytes of a saved page."""
    try:
        file_path = Path(path)
        if file_path.is_dir():
            raise SourceUnavailable(f"{path}: is a directory, not a metrics page")
        with file_path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise SourceUnavailable(f"{path}: no such file") from None
    except PermissionError:
        raise PermissionDeniedError(f"{path}: may not be read by this user") from None
    except (OSError, ValueError) as error:
        raise SourceUnavailable(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return _opened(path, data, max_bytes)


def read_url(url: str, *, timeout_seconds: float, max_bytes: int) -> bytes:
    """The bytes of a page; `timeout_seconds` holds for the connection and again for the answer."""
    import requests  # noqa: PLC0415 - costs 80 ms, only needed for addresses

    shown = shown_url(url)
    try:
        with requests.Session() as session:
            session.trust_env = False
            with session.get(
                url,
                stream=True,
                allow_redirects=False,
                timeout=(timeout_seconds, timeout_seconds),
                headers={"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"},
            ) as response:
                _check_status(shown, response)
                data = _read_body(shown, response, timeout_seconds, max_bytes)
    except requests.exceptions.Timeout:
        raise SourceUnavailable(f"{shown}: no answer within {timeout_seconds:g} s") from None
    except requests.exceptions.SSLError:
        raise SourceUnavailable(f"{shown}: the TLS connection failed") from None
    except requests.exceptions.ConnectionError:
        raise SourceUnavailable(f"{shown}: cannot connect; is the server running?") from None
    except (requests.exceptions.RequestException, UnicodeError, ValueError):
        raise UsageError(f"{shown!r}: not an address that can be read") from None
    return _opened(shown, data, max_bytes)


def _check_status(shown: str, response: requests.Response) -> None:
    status = response.status_code
    if 300 <= status < 400:
        raise SourceError(
            f"{shown}: answers with a redirect, which is not followed; give its target"
        )
    if status in {401, 403}:
        raise PermissionDeniedError(f"{shown}: answers {status}; it wants credentials")
    if status == 404:
        raise NoDataError(
            f"{shown}: no metrics there (404); SGLang publishes them with --enable-metrics only"
        )
    if status != 200:
        raise SourceUnavailable(f"{shown}: answers {status}")


def _read_body(
    shown: str, response: requests.Response, timeout_seconds: float, max_bytes: int
) -> bytes:
    """The body as sent; a server that drips bytes is cut off at the deadline."""
    from urllib3.exceptions import HTTPError, ReadTimeoutError  # noqa: PLC0415 - comes with requests

    # read1 gives what has arrived; read, of old urllib3, waits for a whole block.
    read = getattr(response.raw, "read1", response.raw.read)
    deadline = time.monotonic() + timeout_seconds
    data = bytearray()
    try:
        while block := read(_BLOCK_BYTES, decode_content=False):
            data += block
            if len(data) > max_bytes:
                raise SourceError(_too_large(shown, max_bytes))
            if time.monotonic() > deadline:
                raise SourceUnavailable(f"{shown}: page not complete within {timeout_seconds:g} s")
    except ReadTimeoutError:
        raise SourceUnavailable(f"{shown}: no answer within {timeout_seconds:g} s") from None
    except (HTTPError, OSError):
        raise SourceUnavailable(f"{shown}: the connection was closed early") from None
    return bytes(data)


def _opened(shown: str, data: bytes, max_bytes: int) -> bytes:
    """The page itself, unpacked if it is gzip."""
    if data.startswith(_GZIP_MAGIC):
        unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            data = unpacker.decompress(data, max_bytes + 1)
        except zlib.error:
            raise SourceError(f"{shown}: damaged gzip data") from None
    if len(data) > max_bytes:
        raise SourceError(_too_large(shown, max_bytes))
    return data


def _too_large(shown: str, max_bytes: int) -> str:
    return f"{shown}: more than {max_bytes // 2**20} MiB, not a metrics page"
