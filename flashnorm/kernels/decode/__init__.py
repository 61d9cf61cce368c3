"""Kernels of one decode step: few rows, every weight read once, lengths and positions read from device memory."""
