"""Whether a GPU computes what it should: the tests of the kernels, then the gradients of whole models.

Gradients are compared with the baseline's, bit for bit, under deterministic algorithms. A second run of the
baseline is the control: what differs there too says nothing about fitact.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from threading import Timer

import torch
from torch import Tensor

from benchmarks.gpu.models import make, names
from benchmarks.gpu.record import ROOT, Record, Row
from benchmarks.gpu.variants import VARIANTS, variants_of
from fitact.runtime.choose import reproducibly

TESTS = "tests/runtime/test_gpu.py"
PROCESSES = max(2, 3 * (os.cpu_count() or 2) // 4)
SHARE = 0.6  # of the time, at most, that the tests may take
REHEARSED = ("-k", "test_norms and 768 and float32 or test_sizes_round_the_tile and gelu and 1024 and float32")
PRECISIONS = {"bfloat16": torch.bfloat16, "autocast": torch.float32}  # dtypes of the parameters


def run(record: Record, device: str, tiny: bool) -> None:
    """Add a row for each test, one for all of them, and one for each model, precision and variant."""
    if record.wanted({"tests": TESTS}) and record.left() > 0:
        kernel_tests(record, device)
    for compiled in (False,) if tiny else (False, True):  # what is compiled takes longer than all else
        for model in names(tiny):
            for precision in PRECISIONS:
                whole_models(record, device, tiny, model, precision, compiled)


# -------------------------------------------------------------------------------------------- tests of the kernels


def kernel_tests(record: Record, device: str) -> None:
    """Run the tests of the kernels in several processes; each takes every n-th.

    Without a GPU, Triton's interpreter rehearses a few.
    """
    record.rows = [row for row in record.rows if "test" not in row]  # of a run that was ended
    count = PROCESSES if device == "cuda" else 2
    reading, writing = os.pipe()
    began, outcomes = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{i}.log") for i in range(count)]
        started = [_tests(i, count, writing, log, device) for i, log in enumerate(logs)]
        os.close(writing)
        timer = Timer(max(1.0, SHARE * record.left()), kill, [started])
        timer.start()
        with open(reading, encoding="utf-8") as results:  # ends when all processes have ended
            for line in results:
                row = json.loads(line)
                outcomes[row["outcome"]] += 1
                record.add(row)
        timer.cancel()
        ends = [process.wait() for process in started]
        broken = [
            log.read_text("utf-8")[-600:] for log, end in zip(logs, ends, strict=True) if end not in (0, 1, 5)
        ]
    total: Row = {"tests": TESTS, **outcomes, "seconds": round(time.monotonic() - began, 1)}
    record.add(total | ({"error": broken} if broken else {}))


def kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """End processes that take too long."""
    for process in processes:
        process.kill()


def _tests(part: int, parts: int, results: int, log: Path, device: str) -> subprocess.Popen[bytes]:
    """Start a process that runs its part of the tests and writes each result as a line of JSON."""
    environment = os.environ | {
        "FITACT_TESTS_PART": f"{part}/{parts}",
        "FITACT_TESTS_RESULTS": str(results),
        "FITACT_TESTS_SHARED": str(log.parent),
        "OMP_NUM_THREADS": "1",
        **({} if device == "cuda" else {"TRITON_INTERPRET": "1"}),
    }
    # Warnings of other versions of packages are no wrong results.
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.support.parts", "-W", "default"]
    command = [sys.executable, "-m", "pytest", *options, *(() if device == "cuda" else REHEARSED), TESTS]
    with log.open("wb") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=[results], stdout=output, stderr=subprocess.STDOUT
        )


# --------------------------------------------------------------------------------------------- gradients of models


def whole_models(record: Record, device: str, tiny: bool, model: str, precision: str, compiled: bool) -> None:
    """Compare the gradients of a model under each variant with the baseline's."""
    case = partial(gradients, model, precision, device, tiny)
    baseline = cache(partial(case, "baseline"))  # made with the first row that needs it
    for variant in variants_of(model, compiled):
        if variant != "baseline":
            row = {"model": model, "precision": precision, "variant": variant}
            record.measure(row, partial(compared, partial(case, variant), baseline))


Gradients = Callable[[], dict[str, Tensor]]


def compared(made: Gradients, baseline: Gradients) -> Row:
    """Return how many gradients have the baseline's bits, and how far the gradient of the whole model is off."""
    expected, measured = baseline(), made()
    equal = sum(torch.equal(measured[name], each) for name, each in expected.items())
    off = sum(float((measured[name].float() - each.float()).norm()) ** 2 for name, each in expected.items())
    size = sum(float(each.float().norm()) ** 2 for each in expected.values())
    return {"equal": equal, "of": len(expected), "gradient_off": (off / size) ** 0.5}


def gradients(model: str, precision: str, device: str, tiny: bool, variant: str) -> dict[str, Tensor]:
    """Return the loss and the gradients of a step by name."""
    subject = make(model, device, tiny=tiny, dtype=PRECISIONS[precision])
    casting = partial(torch.autocast, device, torch.bfloat16) if precision == "autocast" else nullcontext
    with casting():
        forward = VARIANTS[variant].prepare(subject)
    parameters = dict(subject.model.named_parameters())

    def step() -> dict[str, Tensor]:
        subject.model.zero_grad(set_to_none=True)
        inputs = subject.inputs()
        torch.manual_seed(2)  # of dropout
        with casting():
            loss = forward(inputs)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        return {"loss": loss.detach()} | gradients

    return reproducibly(step)
