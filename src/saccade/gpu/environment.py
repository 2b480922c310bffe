"""Environment: what a report of a fault should name of a machine, its GPUs and its kernels.

`saccade --version --environment` prints it. Nothing is compiled, and Triton is not imported.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from saccade.gpu import driver, machine_code, stored_code

SETTINGS = ("SACCADE_", "TRITON_", "PTXAS_", "CUDA_VISIBLE_DEVICES", "PYTORCH_", "TORCH")
"""How the names of environment variables begin that change what runs."""
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")  # what a report must not show the value of
KERNEL_MODULE = Path("/proc/driver/nvidia/version")


def environment() -> list[tuple[str, str]]:
    """What it is called and what it is, a line each."""
    return [
        ("platform", platform.platform()),
        ("processor", f"{os.cpu_count()} threads, {torch.get_num_threads()} used by torch"),
        *_gpus(),
        *_code_in_the_package(),
        ("machine code, cache", _code_in_the_cache()),
        ("compiler", _compiler()),
        *_settings(),
    ]


def _gpus() -> Iterator[tuple[str, str]]:
    """Each GPU that PyTorch sees, and the driver; or why there is none."""
    if not torch.cuda.is_available():
        built = "it was built without GPUs" if _built_for() is None else "is there a driver?"
        yield "gpu", f"none that torch sees ({built})"
    else:
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            memory = f"{found.total_memory / 2**30:.0f} GiB"
            capability = f"capability {found.major}.{found.minor}"
            architecture = machine_code.architecture_of(index)
            yield f"gpu {index}", f"{found.name}, {capability} ({architecture}), {memory}"
    yield "driver", _driver()


def _built_for() -> str | None:
    """The CUDA or ROCm that PyTorch was built for."""
    return torch.version.cuda or torch.version.hip


def _driver() -> str:
    """The driver's version, and of NVIDIA's the newest CUDA that it knows."""
    newest = _newest_cuda()
    if newest is None:
        return "none of CUDA's"
    known = f"for CUDA {newest // 1000}.{newest % 1000 // 10} and older"
    release = _driver_release()
    return f"{release}, {known}" if release else known


def _newest_cuda() -> int | None:
    """The newest CUDA that the driver knows, as 1000 · major + 10 · minor; None: no driver."""
    found = ctypes.c_int()
    try:
        result = driver.library().cuDriverGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        return None
    return found.value if result == 0 else None


def _driver_release() -> str:
    """The release of NVIDIA's driver, as `nvidia-smi` or the kernel says it; "": neither does."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    try:
        words = KERNEL_MODULE.read_text(encoding="utf-8").split()
    except OSError:
        return ""
    return next((word for word in words if word.replace(".", "").isdigit()), "")


def _code_in_the_package() -> Iterator[tuple[str, str]]:
    """What the installed package brings, for each architecture, and whether it is used."""
    name = "machine code, package"
    indices = sorted(stored_code.COMPILED.glob("*.index"))
    for index in indices:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = stored_code.shipped(index.stem)
        if found is None:
            why = str(said[0].message) if said else "it does not fit these sources"
            yield name, f"{index.stem}: not used: {why}"
        else:
            yield name, f"{index.stem}: {len(found.places)} variants, by {found.made_by}"
    if not indices:
        yield name, "none comes with this installation"


def _code_in_the_cache() -> str:
    """The folder of the cache and what lies there; whether something keeps it from being used."""
    folder = stored_code.cache()
    if folder is None:
        return "off, as SACCADE_CACHE is empty"
    files = list(folder.iterdir()) if folder.is_dir() else []
    size = sum(file.stat().st_size for file in files) / 2**20
    told = stored_code.told_triton()
    unused = f"; passed by, as is what the package holds, as {told} is set" if told else ""
    return f"{_short(folder)}: {len(files)} files, {size:.1f} MB{unused}"


def _short(folder: Path) -> str:
    """A path as it may stand in a public report: without the name of the user's home."""
    try:
        return str(Path("~") / folder.relative_to(Path.home()))
    except (ValueError, RuntimeError):  # it lies elsewhere, or there is no home
        return str(folder)


def _compiler() -> str:
    """What compiles kernels whose machine code is in neither."""
    version = stored_code.triton_version()
    return "none: Triton is not installed" if version == "none" else f"Triton {version}"


def _settings() -> Iterator[tuple[str, str]]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(SETTINGS):
            yield name, "(set)" if any(word in name for word in SECRET) else value
