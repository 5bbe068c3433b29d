"""A real browser without a window: Chromium by its DevTools protocol over two pipes, without a driver."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """A page of Chromium. `problems` are errors of its console, of its scripts and of its policies."""

    def __init__(self, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        more = ("--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={profile}")
        # The browser reads from its file 3, and writes to its file 4.
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                shell,
                "-",
                f"{CHROMIUM}",
                "--headless",
                "--no-sandbox",
                "--remote-debugging-pipe",
                *more,
            ],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers, self._read, self._session = itertools.count(1), b"", None
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a call of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            pass
        assert "error" not in answer, answer["error"]
        return answer["result"]  # type: ignore[no-any-return]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has ended"
            self._read += part
        text, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(message["params"]["exceptionDetails"]))
        if message.get("method") == "Runtime.consoleAPICalled" and message["params"]["type"] == "error":
            self.problems.append(json.dumps(message["params"]["args"]))
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.problems.append(message["params"]["entry"]["text"])
        return message

    def show(self, url: str, width: int = 1440, theme: str = "light") -> None:
        """Open a page in a window of this width, for a reader who prefers this theme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript on the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 60.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.ask(expression):
            assert time.monotonic() < end, f"never: {expression}"
            time.sleep(0.05)

    def move(self, x: float, y: float, kind: str = "mouseMoved", **more: Any) -> None:
        """An event of the mouse in the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
