"""Entry point of the `oomwatch` command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line; one line and an exit status for every fault, never a traceback."""
    from oomwatch.cli import cli  # noqa: PLC0415 - `python -c "import oomwatch.__main__"` stays cheap
    from oomwatch.errors import NoInputError, OomwatchError  # noqa: PLC0415

    try:
        cli.main(prog_name="oomwatch", standalone_mode=True)
    except NoInputError as error:
        _fail(str(error), 3)
    except OomwatchError as error:
        _fail(str(error), 2)
    except BrokenPipeError:
        # The reader has gone; keep the interpreter from flushing into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (KeyboardInterrupt, EOFError):
        sys.exit(130)
    except RecursionError as error:
        _internal(error)
    except Exception as error:  # noqa: BLE001 - the last line of defence of the command line
        _internal(error)


def _fail(message: str, status: int) -> None:
    print(f"oomwatch: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201
    sys.exit(status)


def _internal(error: BaseException) -> None:
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
    _fail(f"internal fault ({type(error).__name__}): {where}; please report it", 4)


if __name__ == "__main__":
    main()
