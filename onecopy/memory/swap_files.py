from __future__ import annotations
import ctypes, os, tempfile, time, shutil, atexit
from concurrent.futures import ThreadPoolExecutor, Future
from pathlib import Path
import mmap
import torch

POOL = ThreadPoolExecutor(4)

def _view(t):
    n = t.numel() * t.itemsize
    return memoryview((ctypes.c_char * n).from_address(t.data_ptr())).cast("B") if n else memoryview(b"")

class Transfer:
    def __init__(self, f, n): self._f, self.num_bytes, self.seconds = f, n, 0.0
    def wait(self): self.seconds = self._f.result()

class SwapArray:
    def __init__(self, fd, offset, name, unit, numel, dtype):
        self.fd, self.offset, self.name, self.unit, self.numel, self.dtype = fd, offset, name, unit, numel, dtype
    @property
    def nbytes(self): return self.numel * self.dtype.itemsize
    def _go(self, op, start, t):
        assert t.is_contiguous() and t.dtype == self.dtype and start + t.numel() <= self.numel, (self.name, start, t.shape, self.numel, t.dtype)
        at = self.offset + start * t.itemsize
        def run():
            b = time.perf_counter(); v = _view(t); n = 0
            while n < len(v):
                n += op(self.fd, [v[n:]], at + n)
            return time.perf_counter() - b
        return Transfer(POOL.submit(run), t.numel() * t.itemsize)
    def read(self, start, target): return self._go(os.preadv, start, target)
    def write(self, start, source): return self._go(os.pwritev, start, source)

class SwapFolder:
    def __init__(self, path, rank):
        self.folder = Path(tempfile.mkdtemp(dir=path)); self.files = {}; self.num_bytes = 0
        atexit.register(self.close)
    def array(self, name, unit, numel, dtype):
        if name not in self.files: self.files[name] = [os.open(self.folder / name, os.O_RDWR | os.O_CREAT), 0]
        f = self.files[name]; at = f[1]; f[1] += -(-numel * dtype.itemsize // 4096) * 4096
        os.posix_fallocate(f[0], at, max(f[1] - at, 1)); self.num_bytes += f[1] - at
        return SwapArray(f[0], at, name, unit, numel, dtype)
    def buffer(self, n):
        n = max(-(-n // 4096) * 4096, 4096)
        return torch.frombuffer(mmap.mmap(-1, n), dtype=torch.uint8)
    def close(self):
        for f, _ in self.files.values(): os.close(f)
        self.files = {}
        shutil.rmtree(self.folder, ignore_errors=True)
