"""A headless Chromium, driven over its own protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.in_pod_server.support import PATIENCE, eventually

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Tab:
    """One tab: it goes where it is sent, and runs what it is given."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._ids = itertools.count(1)
        self.ask("Page.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._connection.recv(PATIENCE))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def go(self, url: str) -> str:
        """Where it ends up."""
        self.ask("Page.navigate", url=url)
        eventually(
            lambda: self.run(
                "document.readyState === 'complete' && location.href !== 'about:blank'"
            )
        )
        where: str = self.run("location.href")
        return where

    def run(self, script: str) -> Any:
        """What an expression comes to; a promise is waited for."""
        answer = self.ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path, width: int, height: int, *, dark: bool = False) -> None:
        """Take a picture of it as a screen of that size shows it."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def chromium(folder: Path, *options: str) -> Iterator[Tab]:
    """A browser with a profile of its own, and its one tab."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.fail("no Chromium is on PATH: install it, for example `apt-get install chromium`")
    process = subprocess.Popen(
        [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--remote-debugging-port=0", f"--user-data-dir={folder}",
            *options, "about:blank",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        active = folder / "DevToolsActivePort"
        eventually(lambda: active.exists() and "\n" in active.read_text())
        port = active.read_text().splitlines()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as said:
            pages = [each for each in json.load(said) if each["type"] == "page"]
        with connect(
            pages[0]["webSocketDebuggerUrl"], max_size=None, proxy=None, ping_interval=None
        ) as connection:
            yield Tab(connection)
    finally:
        process.terminate()
        process.wait(PATIENCE)
