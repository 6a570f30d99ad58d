import pytest
import torch
import torch._inductor.config as inductor
from torch._inductor.async_compile import AsyncCompile

from scalelong.kernels.compiling import compiled


@pytest.mark.skipif(not hasattr(inductor, "quiesce_async_compile_pool"), reason="this torch has no such sleep")
def test_compilers_are_never_put_to_sleep():
    # A pool with a timer is one that sleeps; torch may not answer from there (pytorch/pytorch#183884).
    # Settings by torch's own way: pytest's would delete them in the end, as they are no attributes to it.
    with inductor.patch(quiesce_async_compile_pool=True, compile_threads=2):
        AsyncCompile.process_pool.cache_clear()
        compiled(torch.sin)
        pool = AsyncCompile.process_pool()
        try:
            assert pool.timer is None
        finally:
            pool.shutdown()
            AsyncCompile.process_pool.cache_clear()
