"""What must be faster than the compiler makes it: operators with Triton kernels on a GPU, plain torch elsewhere."""
