"""A headless Chromium for looking at pages, driven over a pipe in its own debugging protocol.

One browser serves all tests of a session. A look at a page gives what went wrong in it, what it
asked for, where its words are, and a picture.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60.0
WIDE, NARROW = 1280, 400

# Every stretch of visible text as its lines' boxes, cut to what its scrolling ancestors show.
FIND_TEXTS = """(() => {
  const boxes = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.data.trim() || !parent.checkVisibility({visibilityProperty: true})) continue;
    if (parent.closest('svg title, style')) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      let [left, top, right, bottom] = [box.left, box.top, box.right, box.bottom];
      for (let one = parent; one; one = one.parentElement) {
        if (getComputedStyle(one).overflowX === 'visible') continue;
        const clip = one.getBoundingClientRect();
        left = Math.max(left, clip.left); right = Math.min(right, clip.right);
      }
      if (right - left > 1 && bottom - top > 1)
        boxes.push({text: node.data.trim(), left, top, right, bottom});
    }
  }
  return boxes;
})()"""

UNFOLD = "document.querySelectorAll('details').forEach(one => { one.open = true; })"


def find_chromium() -> str | None:
    """The path of a browser that can be driven, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass(frozen=True)
class Box:
    """A line of text where it stands, in pixels."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    def covers(self, other: Box) -> bool:
        """Whether letters of the two are on each other; line boxes may touch."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across > 1 and down > 0.3 * min(self.bottom - self.top, other.bottom - other.top)


@dataclass
class Look:
    """What a page was like. background: the colour behind its text."""

    faults: list[str]
    requests: list[str]
    texts: list[Box]
    overflow: float
    background: str
    picture: bytes = field(repr=False)

    @property
    def overlaps(self) -> list[tuple[str, str]]:
        """Texts that are on each other."""
        return [(a.text, b.text) for a, b in combinations(self.texts, 2) if a.covers(b)]


class Browser:
    """Chromium without a window; close it at the end."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        there, self._to = os.pipe()
        self._from, back = os.pipe()
        # The protocol's pipes are file descriptors 3 and 4 of the browser.
        self._process = subprocess.Popen(
            [
                *("bash", "-c", f'exec "$@" 3<&{there} 4>&{back}', "bash", program, "--headless"),
                *("--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
                *("--disable-dev-shm-usage", "--disable-background-networking"),
                *("--disable-extensions", "--force-device-scale-factor=1"),
                *(f"--user-data-dir={self._folder.name}", "--remote-debugging-pipe"),
            ],
            pass_fds=(there, back),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(back)
        self._number = 0
        self._unread = b""
        self._events: list[dict[str, Any]] = []

    def look(
        self, page: Path, *, width: int = WIDE, dark: bool = False, height: int | None = None
    ) -> Look:
        """Open a file in a new tab, wait until it is there, unfold it, and say what it is like.

        Args:
            height: of the picture, which then shows the page as it is opened; None for all of it.
        """
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        tab = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable", tab)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", tab, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", tab, features=[scheme])
        self._call("Page.navigate", tab, url=page.resolve().as_uri())
        self._wait("Page.loadEventFired")
        if height is None:
            self._ask(tab, UNFOLD)
        found = Look(
            texts=[Box(**box) for box in self._ask(tab, FIND_TEXTS)],
            overflow=self._ask(
                tab, "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            ),
            background=self._ask(tab, "getComputedStyle(document.body).backgroundColor"),
            picture=self._picture(tab, width, height),
            faults=list(_faults(self._events)),
            requests=[
                event["params"]["request"]["url"]
                for event in self._events
                if event["method"] == "Network.requestWillBeSent"
            ],
        )
        self._call("Target.closeTarget", targetId=target)
        return found

    def close(self) -> None:
        """End the browser."""
        os.close(self._to)
        os.close(self._from)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _picture(self, tab: str, width: int, height: int | None) -> bytes:
        part = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self._call(
            "Page.captureScreenshot",
            tab,
            captureBeyondViewport=True,
            **({} if height is None else {"clip": part}),
        )
        return base64.b64decode(shot["data"])

    def _ask(self, tab: str, expression: str) -> Any:
        answer = self._call("Runtime.evaluate", tab, expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer}"
        return answer["result"].get("value")

    def _call(self, method: str, tab: str | None = None, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if tab is not None:
            message["sessionId"] = tab
        os.write(self._to, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
        raise AssertionError(f"Chromium did not answer {method}")

    def _wait(self, event: str) -> None:
        if not any(one["method"] == event for one in self._events):
            next(one for one in self._messages() if one.get("method") == event)

    def _messages(self) -> Iterator[dict[str, Any]]:
        """What comes from the browser; events are kept."""
        end = time.monotonic() + SECONDS
        while True:
            whole, mark, rest = self._unread.partition(b"\0")
            if mark:
                self._unread = rest
                message = json.loads(whole)
                if "method" in message:
                    self._events.append(message)
                yield message
                continue
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium said nothing for {SECONDS:.0f} s"
            got = os.read(self._from, 1 << 20)
            assert got, "Chromium has ended"
            self._unread += got


def _faults(events: list[dict[str, Any]]) -> Iterator[str]:
    for event in events:
        params = event["params"]
        if event["method"] == "Log.entryAdded":
            yield params["entry"]["text"]
        elif event["method"] == "Runtime.exceptionThrown":
            yield params["exceptionDetails"]["text"]
        elif event["method"] == "Runtime.consoleAPICalled":
            yield str(params["args"])
