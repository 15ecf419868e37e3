"""Chromium without a window, told by its debugging pipe what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from types import TracebackType
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def _program() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def has_browser() -> bool:
    """Whether there is one."""
    return _program() is not None


class Browser:
    """One page; everything waits until the browser has answered.

    Attributes:
        errors: What the page's scripts have failed with.
    """

    def __init__(self, width: int = 1100, height: int = 620) -> None:
        self.errors: list[str] = []
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        # It reads from descriptor 3 and writes to 4, whatever these are here.
        options = (
            "--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run "
            f"--disable-dev-shm-usage --window-size={width},{height} "
            f"--user-data-dir={self._folder.name} about:blank"
        )
        script = f'exec "$0" {options} 3<&{orders} 4>&{answers}'
        program = _program()
        assert program is not None
        self._process = subprocess.Popen(
            ["bash", "-c", script, program],
            pass_fds=(orders, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(orders)
        os.close(answers)
        self._buffer, self._last, self._events = b"", 0, list[str]()
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._call("Page.enable")
        self._call("Runtime.enable")

    def open(self, url: str) -> None:
        """Open a page, and wait until it is loaded."""
        self._call("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; None where that goes away."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer.get("result", {}).get("value")

    def screenshot(self) -> bytes:
        """The page as PNG, base64-encoded."""
        return str(self._call("Page.captureScreenshot", format="png")["data"]).encode()

    def wait_for(self, event: str) -> None:
        """Wait until this has happened, unless it has since it was last waited for."""
        while event not in self._events:
            self._take(self._read())
        self._events.clear()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        order = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            order["sessionId"] = self._session
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._last:
                return dict(message.get("result", {}))
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]))
        self._events.append(message.get("method", ""))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._answers, 1 << 16)
            assert read, "the browser has ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._orders)  # it ends then
        os.close(self._answers)
        self._process.wait()
        self._folder.cleanup()
