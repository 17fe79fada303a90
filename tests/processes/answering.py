"""What a Remote of the tests runs: it does as it is asked."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from typing import Any

from fsdpcheck.errors import AdapterError
from fsdpcheck.processes import messages
from fsdpcheck.processes.remote import Answer, Back


def make(back: Back) -> Answer:
    return partial(_answer, back)


def _answer(back: Back, question: Any) -> bytes:
    match question:
        case ("ask back", asked):
            return messages.dumps(("it said", back(asked)))
        case "die":
            sys.stdout.write("famous last words\n")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave":
            os._exit(7)
        case "raise":
            raise AdapterError("its own fault")
        case "break":
            raise ZeroDivisionError("a bug")
        case "compute":
            while True:
                pass
        case "hide":
            return messages.dumps(len)
        case "print":
            print("printed there")
    return messages.dumps((os.getpid(), question))
