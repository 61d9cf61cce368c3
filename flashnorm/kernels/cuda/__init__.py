"""Kernels in CUDA C++, compiled at first use by NVRTC: no compiler and no CUDA toolkit on the user's machine."""
