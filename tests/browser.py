"""Browser: a headless Chromium for tests of pages, driven over two pipes.

It speaks the DevTools protocol (messages of JSON that end in a zero byte), so that nothing is
needed but Chromium itself: no driver, no port.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = (
    "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome",
    "google-chrome-stable",
)  # fmt: skip
MISSING = (
    "found no Chromium, in which the report's page is tested. `make browser BROWSER=install` "
    "installs Debian's chromium-headless-shell (as root); or name another one: "
    "SACCADE_CHROMIUM=/path/to/chromium"
)
SECONDS = 20.0  # without an answer

# Chromium reads descriptor 3 and writes 4, whatever numbers the pipes have here. The shell could do
# this if it took numbers of two digits.
LAUNCH = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""

# What a key sends beside its name: its code, its number and the text that it types.
KEYS = {"Enter": ("Enter", 13, "\r"), " ": ("Space", 32, " "), "Tab": ("Tab", 9, "")}


def find() -> str | None:
    """Where a Chromium lies, or None."""
    named = os.environ.get("SACCADE_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


def required() -> bool:
    """Whether a test may not be skipped for want of a browser: make BROWSER=require says so."""
    return os.environ.get("SACCADE_BROWSER") == "require"


class Browser:
    """A running Chromium with one page; `complaints` holds what the page's console was told."""

    def __init__(self, path: str) -> None:
        self.complaints: list[str] = []
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        its_input, self._writer = os.pipe()
        self._reader, its_output = os.pipe()
        arguments = [
            path, "--headless", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking", "--hide-scrollbars",
            f"--user-data-dir={self._folder.name}",
        ]  # fmt: skip
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")  # which root cannot have
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", LAUNCH, str(its_input), str(its_output), *arguments],
            pass_fds=(its_input, its_output),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(its_input)
        os.close(its_output)
        self._received = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._session = ""
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        """Make a page, and hear what happens on it."""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End Chromium, and remove what it wrote."""
        self._process.kill()
        self._process.wait()
        os.close(self._writer)
        os.close(self._reader)
        self._folder.cleanup()

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What Chromium answers to a command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def open(self, path: Path, width: int = 1280, scheme: str = "light") -> None:
        """Load a page from disk and wait until it is painted."""
        self.complaints.clear()
        self._events.clear()
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.command("Emulation.setEmulatedMedia", features=[feature])
        self.command("Page.navigate", url=path.resolve().as_uri())
        self._wait_for("Page.loadEventFired")
        # Two frames later everything that loading started has been laid out and painted.
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def requests(self) -> list[str]:
        """What was asked for since the page was opened."""
        self.run("0")  # so that all that happened before is read
        sent = [event for event in self._events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def run(self, script: str) -> Any:
        """The value of a piece of JavaScript; a promise is waited for."""
        found = self.command(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of an element."""
        where = self.run(
            f"(() => {{ const element = document.querySelector({json.dumps(selector)});"
            " element.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});"
            " const box = element.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.command(
                "Input.dispatchMouseEvent",
                type=kind, x=where[0], y=where[1], button="left", clickCount=1,
            )  # fmt: skip

    def press(self, key: str) -> None:
        """Press and release a key."""
        code, number, text = KEYS[key]
        for kind in ("keyDown", "keyUp"):
            self.command(
                "Input.dispatchKeyEvent", type=kind, key=key, code=code,
                windowsVirtualKeyCode=number, text=text if kind == "keyDown" else "",
            )  # fmt: skip

    def _receive(self) -> dict[str, Any]:
        """The next message; events are kept, and complaints noted."""
        end = time.monotonic() + SECONDS
        while b"\0" not in self._received:
            if not select.select([self._reader], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium said nothing for {SECONDS:.0f} s")
            part = os.read(self._reader, 1 << 20)
            if not part:
                raise RuntimeError(f"Chromium ended with status {self._process.wait()}")
            self._received += part
        text, _, self._received = self._received.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self._events.append(message)
            self._note(message["method"], message["params"])
        return message

    def _note(self, method: str, about: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(about["exceptionDetails"].get("exception", about)))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.complaints.append(str(about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(about["entry"]["text"])

    def _wait_for(self, method: str) -> None:
        while not any(event["method"] == method for event in self._events):
            self._receive()
