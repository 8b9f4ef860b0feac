"""How much memory one call takes beyond what is in use before it."""

import ctypes
import gc
import sys
from pathlib import Path
from types import TracebackType

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class MemoryGrowth:
    """Measures the growth while its block runs.

    On CUDA: the peak of the bytes that torch has allocated. On the CPU under Linux: the peak of the resident memory of
    the whole process as the kernel counts it, after freed memory was handed back to the system; so it holds what
    libraries keep for themselves, and is right to a few MB. Elsewhere: nothing.

    Attributes:
        num_bytes: peak minus start; `None` where it cannot be measured.
    """

    def __init__(self, device: torch.device):
        self.num_bytes: int | None = None
        self._device = device
        self._start: int | None = None

    def __enter__(self) -> "MemoryGrowth":
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
        elif self._device.type == "cpu" and sys.platform == "linux":
            _hand_back_freed_memory()
            if _reset_peak():
                self._start = _resident_peak()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._start is None:
            return
        on_cuda = self._device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self._device) if on_cuda else _resident_peak()
        self.num_bytes = peak - self._start


def _hand_back_freed_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc; others do without
    if trim is not None:
        trim(0)


def _reset_peak() -> bool:
    """Sets the peak to what is resident now. Returns whether the kernel lets us."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _resident_peak() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
