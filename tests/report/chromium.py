"""A real browser for tests: headless Chromium, spoken to by its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
SECONDS = 60.0  # for any one answer


class Browser:
    """One page in a browser, and everything that it asked the network for."""

    def __init__(self, to_browser: int, from_browser: int):
        self.to_browser, self.from_browser = to_browser, from_browser
        self.unread = b""
        self.num_sent = 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, media: str = "") -> None:
        mobile = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.events.clear()
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        """The addresses that were asked for since the page was opened."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[str]:
        """What the browser wrote into its console: refused styles, broken markup, blocked addresses."""
        entries = [event["params"]["entry"] for event in self.events if event["method"] == "Log.entryAdded"]
        return [str(entry["text"]) for entry in entries]

    def screenshot(self, *, whole: bool = False) -> bytes:
        return base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def print_to_pdf(self) -> bytes:
        answer = self.send("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        return base64.b64decode(answer["data"])

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.num_sent += 1
        message: dict[str, Any] = {"id": self.num_sent, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.num_sent:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def wait_for(self, method: str) -> None:
        while not any(event["method"] == method for event in self.events):
            self._read()

    def _read(self) -> dict[str, Any]:
        """The next message; an event is kept as well."""
        until = time.monotonic() + SECONDS
        while b"\0" not in self.unread:
            ready, _, _ = select.select([self.from_browser], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium did not answer within {SECONDS:.0f} s")
            piece = os.read(self.from_browser, 1 << 20)
            if not piece:
                raise ConnectionError("Chromium ended")
            self.unread += piece
        line, _, self.unread = self.unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message


@contextmanager
def start_browser(profile: Path) -> Iterator[Browser]:
    """Chromium with an empty profile, ended at the end."""
    assert PROGRAM is not None
    reads, to_browser = _pipe()
    from_browser, writes = _pipe()

    def place_pipes() -> None:
        os.dup2(reads, 3)  # where Chromium reads
        os.dup2(writes, 4)  # and writes

    process = subprocess.Popen(
        [PROGRAM, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(3, 4),
        preexec_fn=place_pipes,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(reads)
    os.close(writes)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        process.terminate()
        process.wait(timeout=SECONDS)
        os.close(to_browser)
        os.close(from_browser)


def _pipe() -> tuple[int, int]:
    """A pipe whose numbers are neither 3 nor 4, which Chromium's own ends will have."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
