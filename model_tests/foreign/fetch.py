"""Fetches the versions of vLLM that the tests know, and unpacks the Python files of each into a folder of its own.

`python -m model_tests.foreign.fetch [FOLDER]`; without a folder, one in the system's temporary directory. Nothing is
installed; the wheels, 300 MB each, are removed again. Prints the folder.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from model_tests.foreign.loading import VERSIONS

DOWNLOAD = (
    *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
    *(
        "--no-deps",
        "--only-binary",
        ":all:",
        "--platform",
        "manylinux_2_28_x86_64",
        "--python-version",
        "3.11",
    ),
)


def fetch(folder: Path) -> None:
    """Bring what is missing into `folder`, which need not exist. Raises CalledProcessError if pip fails."""
    for version in VERSIONS:
        if (folder / version / "vllm").is_dir():
            continue
        with tempfile.TemporaryDirectory(prefix="quiesce-foreign-") as scratch:
            subprocess.run([*DOWNLOAD, "--dest", scratch, f"vllm=={version}"], check=True, timeout=900)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                names = [
                    name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")
                ]
                archive.extractall(folder / version, names)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir(), "quiesce-foreign")
    fetch(target)
    print(target)
