"""CUDA: kernels in Triton (kernels/) and whole rounds as CUDA graphs (rounds/)."""
