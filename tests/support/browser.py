"""Drives a headless Chromium over its debugging pipe: opens pages, notes what they complain of, asks what they show."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any


def find_chromium() -> str | None:
    """The path of a Chromium (Debian's package chromium) or Chrome; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One page of one browser without a window. `problems` has what the page since `open` has complained of.

    Args:
        chromium: the program.
        profile: an empty folder for what it writes.
    """

    def __init__(self, chromium: str, profile: Path) -> None:
        self.problems: list[str] = []
        self._ids = itertools.count(1)
        self._text = b""
        self._session: str | None = None
        self._loaded = False
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads commands from its file descriptor 3 and answers on 4.
        flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run"
        program = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        words = [chromium, *flags.split(), "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", program, "bash", str(theirs_in), str(theirs_out), *words],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def __enter__(self) -> Browser:
        target = next(found for found in self.call("Target.getTargets")["targetInfos"] if found["type"] == "page")[
            "targetId"
        ]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(1280, 900)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        """Opens a page and waits until it is loaded."""
        self.problems, self._loaded = [], False
        failed = self.call("Page.navigate", url=url).get("errorText")
        assert not failed, f"{url}: {failed}"
        self._read_until(lambda: self._loaded, f"{url} to load")

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript on the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 20.0) -> Any:
        """The first value of an expression that counts as true."""
        end = time.monotonic() + timeout_s
        while not (value := self.ask(expression)):
            assert time.monotonic() < end, f"{expression} is still {value!r} after {timeout_s:g} s"
            time.sleep(0.05)
        return value

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Gives one command of the DevTools protocol and returns its result."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer: dict[str, Any] = {}

        def is_answered() -> bool:
            return bool(answer)

        self._read_until(is_answered, method, lambda found: answer.update(found) if found.get("id") == number else None)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _read_until(self, is_done: Any, what: str, note: Any = None, timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while not is_done():
            while b"\0" not in self._text:
                ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
                assert ready, f"waited {timeout_s:g} s for {what}"
                received = os.read(self._in, 1 << 20)
                assert received, f"the browser ended while it was asked for {what}"
                self._text += received
            text, _, self._text = self._text.partition(b"\0")
            found = json.loads(text)
            self._note_event(found)
            if note is not None:
                note(found)

    def _note_event(self, found: dict[str, Any]) -> None:
        method, values = found.get("method"), found.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(values["exceptionDetails"].get("exception", values["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "assert"):
            self.problems.append(str([each.get("value", each.get("description")) for each in values["args"]]))
        elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.problems.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif method == "Network.loadingFailed" and not values.get("canceled"):
            self.problems.append(values["errorText"])
