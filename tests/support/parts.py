"""A plugin of pytest for benchmarks/gpu: a process runs a part of the tests and writes the results as they come.

FITACT_TESTS_PART is "i/n": test i and every n-th after it. FITACT_TESTS_RESULTS is the number of an open file.
"""

import json
import os

import pytest

LONGEST = 800  # characters of an error: a line must pass through a pipe in one piece


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    part, parts = map(int, os.environ["FITACT_TESTS_PART"].split("/"))
    items[:] = items[part::parts]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    row = {"test": report.nodeid.partition("::")[2], "outcome": report.outcome}
    row |= {"error": report.longreprtext[-LONGEST:]} if report.failed else {}
    line = json.dumps(row | {"seconds": round(report.duration, 1)}, ensure_ascii=False) + "\n"
    os.write(int(os.environ["FITACT_TESTS_RESULTS"]), line.encode())
