"""The Triton kernels of the shared operators. Each file imports triton and ``kalign_core.declare``, nothing else."""
