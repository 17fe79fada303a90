"""How a command ends: with what it returns, or with the code of the error it raises, which is printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from fsdpcheck.errors import USAGE, FsdpcheckError, UsageError
from fsdpcheck.errors.excerpt import WHOLE, excerpt, visible
from fsdpcheck.session.ledger import INTERRUPTED


def guarded(command: Callable[[], int]) -> int:
    """The exit code of a command, or that of the error it raises, which is printed."""
    try:
        return command()
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
