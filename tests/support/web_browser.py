"""A headless Chromium driven over its debugging pipe: no driver program, no port, no library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from select import select
from typing import Any

TIMEOUT = 60.0
"""Seconds that one command, or loading a page, may take."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-sync", "--mute-audio"),
    *("--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"),
)
# Chromium reads commands from descriptor 3 and writes replies to 4, whatever numbers the pipes have here.
_EXEC = "import os, sys; r, w = map(int, sys.argv[1:3]); a, b = os.dup(r), os.dup(w); os.dup2(a, 3); os.dup2(b, 4); "
_EXEC += "[os.set_inheritable(fd, True) for fd in (3, 4)]; os.execv(sys.argv[3], sys.argv[3:])"


def find_browser() -> str | None:
    """Path of an installed Chromium or Chrome."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class BrowserError(Exception):
    """The browser did not do what was asked."""


class Browser:
    """One page. Use as a context manager."""

    def __init__(self, path: str, width: int = 1100, height: int = 900) -> None:
        self._number = 0
        self._buffer = b""
        self.events: list[dict[str, Any]] = []
        """Everything the browser told unasked."""
        self._profile = tempfile.TemporaryDirectory(prefix="turngym-browser-", ignore_cleanup_errors=True)
        reads, self._write = os.pipe()
        self._read, writes = os.pipe()
        arguments = [*_FLAGS, f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _EXEC, str(reads), str(writes), path, *arguments],
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        self._session: str | None = None
        try:
            target = self._page()
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the DevTools protocol and wait for its reply."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + TIMEOUT
        while True:
            reply = self._receive(until, method)
            if reply.get("id") == self._number:
                if "error" in reply:
                    raise BrowserError(f"{method}: {reply['error']}")
                return dict(reply["result"])
            self.events.append(reply)

    def open(self, url: str) -> None:
        """Go to an address and wait until it is loaded."""
        self._navigate(lambda: self.call("Page.navigate", url=url))

    def back(self) -> None:
        """The browser's own button; the page before may come from its memory, without loading."""
        entries = self.call("Page.getNavigationHistory")
        before = entries["entries"][entries["currentIndex"] - 1]
        self.call("Page.navigateToHistoryEntry", entryId=before["id"])

    def click(self, selector: str, navigates: bool = True) -> None:
        """A real mouse click in the middle of the first element that matches; waits for the page it leads to."""
        script = f"document.querySelector({json.dumps(selector)})"
        box = self.value(
            f"(() => {{ const e = {script}; if (!e) return null; e.scrollIntoView({{block: 'center'}});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()"
        )
        if box is None:
            raise BrowserError(f"nothing matches {selector!r} on {self.value('location.href')}")
        at = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}

        def press() -> None:
            self.call("Input.dispatchMouseEvent", type="mousePressed", **at)
            self.call("Input.dispatchMouseEvent", type="mouseReleased", **at)

        if navigates:
            self._navigate(press)
        else:
            press()

    def type(self, text: str) -> None:
        """Type into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def press_enter(self) -> None:
        """Press Enter and wait for the page it leads to."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}

        def press() -> None:
            self.call("Input.dispatchKeyEvent", type="keyDown", **key)
            self.call("Input.dispatchKeyEvent", type="keyUp", **{**key, "text": ""})

        self._navigate(press)

    def value(self, script: str) -> Any:
        """The JSON value of a JavaScript expression in the page (the page's own policy does not bind it)."""
        reply = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in reply:
            raise BrowserError(f"{script}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until a JavaScript expression is true."""
        until = time.monotonic() + TIMEOUT
        while not self.value(script):
            if time.monotonic() > until:
                raise BrowserError(f"never true on {self.value('location.href')}: {script}")
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """What a person reads in the first element that matches; empty if there is none."""
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.textContent.trim() ?? ''"))

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """End the browser and everything it started."""
        for pipe in (self._write, self._read):
            os.close(pipe)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()

    def _navigate(self, act: Any) -> None:
        self.events.clear()
        act()
        until = time.monotonic() + TIMEOUT
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive(until, "loading a page"))

    def _page(self) -> str:
        for target in self.call("Target.getTargets")["targetInfos"]:
            if target["type"] == "page":
                return str(target["targetId"])
        return str(self.call("Target.createTarget", url="about:blank")["targetId"])

    def _receive(self, until: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select([self._read], [], [], max(until - time.monotonic(), 0))
            piece = os.read(self._read, 1 << 20) if ready else b""
            if not piece:
                raise BrowserError(f"{what}: the browser {'has ended' if ready else f'took over {TIMEOUT} s'}")
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
