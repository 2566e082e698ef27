"""A plugin of pytest: each test's outcome goes to a JSON-lines file as soon as it is known (-p gpu.record_tests)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ERROR_CHARACTERS = 4000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--records", type=Path, required=True, help="JSON-lines file to append to")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config.getoption("--records")))


class Recorder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._add(report, seconds=round(report.duration, 2))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._add(report)

    def _add(self, report: Any, **fields: Any) -> None:
        error = {} if report.passed else {"error": str(report.longrepr)[-ERROR_CHARACTERS:]}
        record = {"test": report.nodeid, "outcome": report.outcome, **fields, **error}
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
