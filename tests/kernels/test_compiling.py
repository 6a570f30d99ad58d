import torch
import torch._inductor.config as inductor
from torch._inductor.async_compile import AsyncCompile

from scalelong.kernels.compiling import compiled


# torch's own way of setting back: pytest's would delete the settings, which are no attributes to it.
@inductor.patch(quiesce_async_compile_pool=True, compile_threads=2)
def test_compilers_are_never_put_to_sleep():
    # A pool with a timer is one that sleeps; torch may not answer from there (pytorch/pytorch#183884).
    AsyncCompile.process_pool.cache_clear()
    compiled(torch.sin)
    pool = AsyncCompile.process_pool()
    try:
        assert pool.timer is None
    finally:
        pool.shutdown()
        AsyncCompile.process_pool.cache_clear()
