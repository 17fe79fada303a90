"""A headless browser over the DevTools protocol, through a pipe: no port, no network, no driver to install."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS: Final = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-extensions", "--disable-background-networking", "--remote-debugging-pipe",
)  # fmt: skip

_ON_3_AND_4: Final = """import os, sys
theirs, told = (os.dup(int(number)) for number in sys.argv[1:3])
os.dup2(theirs, 3), os.dup2(told, 4)
os.set_inheritable(3, True), os.set_inheritable(4, True)
os.execv(sys.argv[3], sys.argv[3:])"""
"""Begins a browser with the protocol on the descriptors where it looks for it. Copies first: either may be 3 or 4."""


def found() -> str | None:
    """The browser of this machine, if it has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page. ``send`` speaks the protocol; the rest is what tests say with it."""

    def __init__(self, reading: IO[bytes], writing: IO[bytes]) -> None:
        self._read, self._write = reading, writing
        self._left, self._numbers, self.events = b"", itertools.count(1), list[dict[str, Any]]()
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    _session = ""

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method. Raises AssertionError for what the browser refuses."""
        number = next(self._numbers)
        told = {"id": number, "method": method, "params": parameters}
        told |= {"sessionId": self._session} if self._session else {}
        self._write.write(json.dumps(told).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def open(self, file: Path, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Load a file in a window of that size, with light or dark wanted; returns when it is loaded."""
        self.resize(width, height)
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.events.clear()
        self.send("Page.navigate", url=file.absolute().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def tell(self, expression: str) -> Any:
        """The value of a JavaScript expression, as data."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys, one after another: "Tab", "Enter", "ArrowDown", or one character."""
        for key in keys:
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            code = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38,
                    "ArrowRight": 39, "ArrowDown": 40}.get(key, ord(key[0].upper()))  # fmt: skip
            known = {"key": key, "code": key, "windowsVirtualKeyCode": code}
            self.send("Input.dispatchKeyEvent", type="keyDown", **known, **({"text": text} if text else {}))
            self.send("Input.dispatchKeyEvent", type="keyUp", **known)

    def picture(self, file: Path, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            more = self._read.read(1 << 16)
            assert more, "the browser is gone"
            self._left += more
        first, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(first))


@contextmanager
def browser(path: str) -> Iterator[Page]:
    """A page of a browser that is ended behind it."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        (theirs, mine), (answers, told) = os.pipe(), os.pipe()
        command = [
            sys.executable,
            "-c",
            _ON_3_AND_4,
            str(theirs),
            str(told),
            path,
            *_FLAGS,
            f"--user-data-dir={folder}",
        ]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, pass_fds=(theirs, told), stdout=quiet, stderr=quiet)
        os.close(theirs)
        os.close(told)
        try:
            with os.fdopen(answers, "rb", 0) as reading, os.fdopen(mine, "wb", 0) as writing:
                yield Page(reading, writing)
        finally:
            process.terminate()
            process.wait()
