"""A headless Chromium that tests drive over the DevTools protocol, with the standard library alone."""

import base64
import json
import os
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    # No host but this one has an address.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """The browser that the environment variable CHROMIUM names, or the first that is installed."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of a folder's files, which ends with the block."""

    class Quiet(SimpleHTTPRequestHandler):
        extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript"}

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Patient(ThreadingHTTPServer):
        # A browser opens many connections at once; of those that find no place, some wait for minutes.
        request_queue_size = 128

    with Patient(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """The ratio by which WCAG 2 measures whether text can be read."""
    lights = []
    for colour in (one, other):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


class Chromium:
    """One browser with one page; everything the page complains of is kept in `complaints`.

    The protocol's messages are JSON ended by a zero byte, from us on the browser's descriptor 3 and to us on its 4.

    Raises: TimeoutError if the browser does not answer in time.
    """

    def __init__(self, program: str, profile: Path, size: tuple[int, int] = (1400, 860)) -> None:
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()

        def as_3_and_4() -> None:
            # First out of the way: the pipes' own numbers may be 3 and 4.
            high = os.dup2(to_browser, 60), os.dup2(from_browser, 61)
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        flags = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", "about:blank"]
        self._process = subprocess.Popen(
            [program, *flags],
            preexec_fn=as_3_and_4,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._unread, self._number = b"", 0
        self.complaints: list[str] = []
        self._loaded = False
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(*size)

    def open(self, page: Path | str, fragment: str = "") -> None:
        """Load a page from a file or an address, and wait until its scripts have run."""
        self.complaints.clear()
        address = page.as_uri() if isinstance(page, Path) else page
        # From another page, so that a new fragment alone loads the page too.
        for url in ("about:blank", address + (f"#{fragment}" if fragment else "")):
            self._loaded = False
            self.call("Page.navigate", url=url)
            self._until(lambda: self._loaded)
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for has been drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, promises awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event: mouseMoved, mousePressed, mouseReleased or mouseWheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)
        self.settle()

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key by its name and its Windows code, and the text that it writes; a button wants that of Enter, "\\r"."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)
        self.settle()

    def type(self, text: str) -> None:
        """Text where the focus is, in place of what is selected there."""
        self.call("Input.insertText", text=text)
        self.settle()

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, **features: str) -> None:
        """What the user prefers, such as color_scheme="dark"; all else is as it was at the start."""
        wanted = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=wanted)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        os.close(self._to)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answers: list[dict[str, Any]] = []

        def answered() -> bool:
            return bool(answers)

        number = self._number
        self._until(answered, lambda got: answers.append(got) if got.get("id") == number else None)
        if "error" in answers[0]:
            raise AssertionError(f"{method}: {answers[0]['error']}")
        return answers[0].get("result", {})

    def _until(self, done: Any, take: Any = None, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._from], [], [], left)[0]:
                raise TimeoutError(f"Chromium did not answer within {timeout_s:.0f} s")
            read = os.read(self._from, 1 << 20)
            if not read:
                raise TimeoutError("Chromium has ended")
            *whole, self._unread = (self._unread + read).split(b"\0")
            for text in whole:
                message = json.loads(text)
                self._note(message)
                if take is not None:
                    take(message)

    def _note(self, message: dict[str, Any]) -> None:
        """Keep what the page complains of, and each request that is not for the page itself."""
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(params["entry"]))
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "about:", "data:", "blob:", "http://127.0.0.1:")):
                self.complaints.append(f"asked for {url}")
