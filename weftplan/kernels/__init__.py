"""Kernels of operators for CPUs, compiled by LLVM, and for GPUs, in CUDA C; operators find them by name."""
