"""The process that a supervised session runs in: arguments FD PLAN DONE, events as lines of JSON to the pipe FD.

Everything that may crash, hang or print happens here; the parent (supervise.py) stays light and survives.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from fsdpcheck.errors import INTERNAL, FsdpcheckError
from fsdpcheck.plan import Plan

if TYPE_CHECKING:
    from fsdpcheck.engines.base import Engine
    from fsdpcheck.session import Emit


def main() -> int:
    """Run the session; returns the process's exit code, which the parent only needs when the pipe ended early."""
    faulthandler.enable(all_threads=False)
    signal.signal(signal.SIGINT, _interrupt_once)
    pipe = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", buffering=1)
    plan, done = Plan.from_json(sys.argv[2]), {(law, adapter) for law, adapter in json.loads(sys.argv[3])}

    def emit(event: dict[str, Any]) -> None:
        try:
            pipe.write(json.dumps(event) + "\n")
        except BrokenPipeError:  # the parent is gone, and so is everybody who would read on
            raise KeyboardInterrupt from None

    try:
        emit(told_session(plan, emit, done))
    except KeyboardInterrupt:
        return 130
    return 0


def replay() -> int:
    """Run the case of one trusted token: arguments FD TOKEN ENGINE BUDGET; one event, the verdict or an error."""
    faulthandler.enable(all_threads=False)
    signal.signal(signal.SIGINT, _interrupt_once)
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", buffering=1) as pipe:
        try:
            from fsdpcheck import replay as tokens
            from fsdpcheck import session

            verdict = session.replayed(tokens.decode(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
            event: dict[str, Any] = {"event": "verdict", **verdict.to_data()}
        except KeyboardInterrupt:
            return 130
        except FsdpcheckError as error:
            event = {"event": "error", "text": str(error), "exit_code": error.exit_code}
        except Exception:
            event = {"event": "error", "text": traceback.format_exc().rstrip(), "exit_code": INTERNAL}
        pipe.write(json.dumps(event) + "\n")
    return 0


def told_session(
    plan: Plan, emit: Emit, done: Collection[tuple[str, str]] = (), engine: Engine | None = None
) -> dict[str, Any]:
    """Run a session (see session.run_session), errors as events; returns the last event, for the caller to emit."""
    interrupted = False
    try:
        from fsdpcheck import session  # here, so that a broken torch is reported like any other error

        session.run_session(plan, emit, done, engine)
    except KeyboardInterrupt:
        interrupted = True
    except FsdpcheckError as error:
        emit({"event": "error", "text": str(error), "exit_code": error.exit_code})
    except Exception:
        emit({"event": "error", "text": traceback.format_exc().rstrip(), "exit_code": INTERNAL})
    return {"event": "end", "interrupted": interrupted}


def _interrupt_once(number: int, frame: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal and the parent both send it; cleaning up is not redone
    raise KeyboardInterrupt
