"""How a command ends: with what it returns, or with the code of the error it raises, which is printed."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

from fsdpcheck.errors import INTERNAL, USAGE, FsdpcheckError, UsageError
from fsdpcheck.errors.excerpt import WHOLE, excerpt, visible
from fsdpcheck.errors.reading import Unreadable
from fsdpcheck.session.ledger import INTERRUPTED


def guarded(command: Callable[[], int]) -> int:
    """The exit code of a command, or that of the error it raises, which is printed.

    What the terminal's encoding lacks, as in names of files where the locale is C, is printed by its number.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = command()
        sys.stdout.flush()
        return code
    except UsageError as error:
        say(f"fsdpcheck: {visible(excerpt(str(error), WHOLE))}")
        return error.exit_code
    except FsdpcheckError as error:
        print(f"fsdpcheck: {visible(excerpt(str(error), WHOLE))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("fsdpcheck: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `fsdpcheck list | head`
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return USAGE
    except Unreadable as error:
        say(f"fsdpcheck: {visible(excerpt(str(error), WHOLE))}")
        return USAGE
    except OSError as error:  # a disk that is full, a file that is gone
        named = f"{error.filename}: " if error.filename else ""
        print(f"fsdpcheck: the system refused: {named}{error.strerror or error}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # it is stdout that takes nothing more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERNAL
    except Exception:  # Python's own code for it is that of a finding
        traceback.print_exc()
        print("fsdpcheck: this is an error of fsdpcheck, and says nothing of what was to be checked", file=sys.stderr)
        return INTERNAL


def say(text: str) -> None:
    """On stderr, once however many ranks meet it."""
    if not serves():
        print(text, file=sys.stderr)


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def serves() -> bool:
    """Whether this process is a rank of torchrun that another drives, and that says the same."""
    return is_launched() and os.environ.get("RANK", "0") != "0"
