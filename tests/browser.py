"""One headless Chromium that a test drives by its DevTools protocol over a pipe, and a server of files."""

import base64
import contextlib
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_CHROMIUM = "no chromium on this machine: apt-get install chromium"

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe"]
PATIENCE_S = 60.0
TALLEST = 6_000  # pixels of a picture
LOOK = (Path(__file__).parent / "look.js").read_text()


class Quiet(http.server.SimpleHTTPRequestHandler):
    requested: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.requested.append(self.path)
        super().do_GET()

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def served(root: Path) -> Iterator[str]:
    """The URL of a server of the folder."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(root))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Browser:
    """One page of a Chromium: `open` shows an address, `run` asks it by JavaScript, `said` has its console's complaints."""

    def __init__(self, to: int, read: int):
        self.to, self.read, self.rest, self.last = to, read, b"", 0
        self.said: list[str] = []
        self.loaded = False
        self.session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Network.setCacheDisabled", cacheDisabled=True)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The protocol's answer to one command."""
        self.last += 1
        message = {"id": self.last, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.last:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.read], [], [], PATIENCE_S)
            piece = os.read(self.read, 1 << 20) if ready else b""
            assert piece, f"chromium said nothing for {PATIENCE_S:.0f} s"
            self.rest += piece
        message, _, self.rest = self.rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, found = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            self.said.append(found["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.said.append(str([each.get("value") or each.get("description") for each in found["args"]]))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            entry = found["entry"]
            if not entry.get("url", "").endswith("/favicon.ico"):
                self.said.append(f"{entry['text']} {entry.get('url', '')}")
        elif method == "Network.loadingFailed" and not found.get("canceled"):
            self.said.append(f"not loaded: {found['type']} {found['errorText']}")

    def open(self, url: str, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Show the address on a screen so wide, and wait for what it loads."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width, height)
        self.send("Page.navigate", url="about:blank")  # the same address with another fragment would not load anew
        self.settle()
        origin = "/".join(url.split("/")[:3])  # as on a first visit: a theme may remember the last one's scheme
        self.send("Storage.clearDataForOrigin", origin=origin, storageTypes="all")
        self.said.clear()
        self.loaded = False
        self.send("Page.navigate", url=url)
        ends = time.monotonic() + PATIENCE_S
        while not self.loaded:
            assert time.monotonic() < ends, f"{url} did not load"
            self._note(self._next())
        self.settle()

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def settle(self) -> None:
        """Let scripts and layout run: two frames and a moment."""
        frames = "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50)))"
        self.run(f"new Promise((done) => {frames})")

    def run(self, script: str) -> Any:
        """What an expression in the page's JavaScript comes to, a promise's value where it is one."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """The expression's value as soon as it is neither false nor empty."""
        ends = time.monotonic() + PATIENCE_S
        while not (found := self.run(script)):
            assert time.monotonic() < ends, f"in vain: {script}"
            self.settle()
        return found

    def picture(self, path: Path) -> None:
        """The page from top to bottom as a PNG, of TALLEST pixels at most."""
        width, height = self.run("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, TALLEST), "scale": 1}
        found = self.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def look(self) -> dict[str, Any]:
        """What look.js finds wrong with the page, what a click unfolds as well: a list for each fault."""
        unfold = "each.removeAttribute('name'); each.open = true;"  # of one name only one is open
        self.run(f"document.querySelectorAll('details').forEach((each) => {{ {unfold} }})")
        self.resize(self.run("innerWidth"), max(900, self.run("document.documentElement.scrollHeight")))
        self.settle()
        found: dict[str, Any] = self.run(f"({LOOK})()")
        return found | {"console": list(self.said)}


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A Chromium with a profile of its own, ended with the block."""
    assert CHROMIUM is not None
    ours, theirs = os.pipe(), os.pipe()  # (read, write) of what it reads as 3, and of what it writes as 4
    plumbing = f'exec 3<&{ours[0]} 4>&{theirs[1]}; exec "$@"'
    command = ["bash", "-c", plumbing, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        command, pass_fds=[ours[0], theirs[1]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(ours[0])
    os.close(theirs[1])
    try:
        yield Browser(ours[1], theirs[0])
    finally:
        os.close(ours[1])
        os.close(theirs[0])
        process.terminate()
        process.wait()
