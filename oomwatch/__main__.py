"""Entry point of the `oomwatch` command."""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import click

_OUTPUT_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Run the command line; one line and an exit status for every fault, never a traceback."""
    try:
        _prepare_outputs()
        status = _run()
    except (KeyboardInterrupt, EOFError):
        status = 130
    sys.exit(status)


def _run() -> int:
    import click  # noqa: PLC0415 - here, so that Ctrl-C during its import is quiet too

    from oomwatch.cli import cli, describe_error  # noqa: PLC0415
    from oomwatch.errors import NoInputError, OomwatchError, SourceError  # noqa: PLC0415

    completion = os.environ.get("_OOMWATCH_COMPLETE")
    if completion:
        from click.shell_completion import shell_complete  # noqa: PLC0415

        return shell_complete(cli, {}, "oomwatch", "_OOMWATCH_COMPLETE", completion)
    try:
        # Not `cli.main()`: it ends Ctrl-C and a closed pipe with 1, which here means an incident,
        # and repeats a mistyped word with the escapes in it.
        with cli.make_context("oomwatch", sys.argv[1:]) as context:
            cli.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        return _fail(_with_hint(error), 2)
    except (NoInputError, SourceError) as error:  # where one of several fails, the command goes on
        return _fail(describe_error(error), 3)
    except OomwatchError as error:
        return _fail(describe_error(error), 2)
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            return _internal(error)
        _drop_output()
        return _fail(f"the output cannot be written: {error.strerror}", 4)
    except Exception as error:  # noqa: BLE001 - the last line of defence of the command line
        return _internal(error)
    return 0


def _prepare_outputs() -> None:
    """Replace streams that were closed (``>&-``), and take any text in any locale's encoding."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - for good
        else:
            stream.reconfigure(errors="replace")


def _drop_output() -> None:
    """Keep the interpreter from flushing into a closed pipe or a full disk at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_hint(error: click.ClickException) -> str:
    """What is wrong with the command line, and where its options are listed."""
    context = getattr(error, "ctx", None)
    hint = f" (see '{context.command_path} --help')" if context is not None else ""
    return f"{error.format_message().rstrip('.')}{hint}"


def _fail(message: str, status: int) -> int:
    from oomwatch.cli import print_error  # noqa: PLC0415

    print_error(message)
    return status


def _internal(error: BaseException) -> int:
    """Keep the details in a private file and say where."""
    import tempfile  # noqa: PLC0415
    import traceback  # noqa: PLC0415

    where = "the details could not be written"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="oomwatch-fault-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            traceback.print_exception(error, file=file)
            where = f"details are in {file.name}"
    except OSError:
        pass
    return _fail(f"internal fault ({type(error).__name__}): {where}; please report it", 4)


if __name__ == "__main__":
    main()
