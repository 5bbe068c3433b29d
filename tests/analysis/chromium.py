"""A headless Chromium for tests, driven through its own protocol (Chrome DevTools Protocol)."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio", "--remote-debugging-port=0"),
)


class Page:
    """One tab. `requests` are the addresses that it has asked for, `errors` what its console said."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._last = 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of one command of the protocol."""
        self._last += 1
        number = self._last
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=60))
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, facts = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.errors.append(facts["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning"):
            self.errors.append(str(facts["args"]))

    def open(self, file: Path) -> None:
        """Load a file and wait until it has been."""
        self.call("Page.navigate", url=file.as_uri())
        self.until("document.readyState === 'complete'")

    def value(self, script: str) -> Any:
        """What an expression of JavaScript gives in the page; promises are waited for."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", script))
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 30.0) -> None:
        """Wait for an expression to become true."""
        end = time.monotonic() + seconds
        while not self.value(script):
            if time.monotonic() > end:
                raise TimeoutError(f"{script} was not true within {seconds:.0f} s; console: {self.errors}")
            time.sleep(0.05)

    def size(self, width: int, height: int, phone: bool = False) -> None:
        """Give the window another size; a phone has a dense screen and is touched."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)

    def system_colors(self, name: str) -> None:
        """What the system of the user prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """What is on the screen, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def pdf(self) -> bytes:
        """What would be printed, on A4."""
        found = self.call("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)
        return base64.b64decode(found["data"])


@contextmanager
def chromium(scratch: Path) -> Iterator[Page]:
    """A browser with an empty profile below `scratch`, and its only tab."""
    assert PROGRAM is not None
    profile = scratch / "profile"
    command = [PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with connect(_address(profile / "DevToolsActivePort"), max_size=None, proxy=None) as connection:
            yield Page(connection)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _address(file: Path) -> str:
    """Where the tab listens, as soon as the browser has written down its port."""
    end = time.monotonic() + 30
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        with suppress(OSError, IndexError, StopIteration):
            port = int(file.read_text().splitlines()[0])
            tabs = json.loads(opener.open(f"http://127.0.0.1:{port}/json/list", timeout=10).read())
            return str(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
        if time.monotonic() > end:
            raise TimeoutError("Chromium did not say where it listens")
        time.sleep(0.05)
