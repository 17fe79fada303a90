"""A headless browser over the DevTools protocol, through a pipe: no port, no network, no driver to install."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS: Final = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-extensions", "--disable-background-networking", "--remote-debugging-pipe",
)  # fmt: skip


def found() -> str | None:
    """The browser of this machine, if it has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page. ``send`` speaks the protocol; the rest is what tests say with it."""

    def __init__(self, reading: int, writing: int) -> None:
        self._read, self._write = os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0)
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

    def close(self) -> None:
        self._read.close()
        self._write.close()


@contextmanager
def browser(path: str) -> Iterator[Page]:
    """A page of a browser that is ended behind it. The protocol is on the descriptors 3 and 4 of the browser."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        (theirs, mine), (answers, told) = os.pipe(), os.pipe()
        command = f'exec "$0" "$@" 3<&{theirs} 4>&{told}'
        process = subprocess.Popen(
            ["/bin/sh", "-c", command, path, *_FLAGS, f"--user-data-dir={folder}"],
            pass_fds=(theirs, told),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(told)
        page = None
        try:
            page = Page(answers, mine)
            yield page
        finally:
            if page is not None:
                page.close()
            process.terminate()
            process.wait()
