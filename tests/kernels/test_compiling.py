import torch
import torch._inductor.config as inductor
from torch._inductor.async_compile import AsyncCompile

from scalelong.kernels.compiling import compiled


def test_compilers_are_never_put_to_sleep(monkeypatch):
    # A pool with a timer is one that sleeps; torch may not answer from there (pytorch/pytorch#183884).
    monkeypatch.setattr(inductor, "quiesce_async_compile_pool", True)
    monkeypatch.setattr(inductor, "compile_threads", 2)
    AsyncCompile.process_pool.cache_clear()
    compiled(torch.sin)
    pool = AsyncCompile.process_pool()
    try:
        assert pool.timer is None
    finally:
        pool.shutdown()
        AsyncCompile.process_pool.cache_clear()
