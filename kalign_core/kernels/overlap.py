"""Starting while the kernel ahead in the stream still ends: programmatic dependent launch.

A kernel launched so may begin before its predecessor's last program has ended; it then waits, before it touches memory,
until that one is complete and everything it wrote can be seen, and lets its own successor begin to wait. What is
saved is the gap between two launches of one stream or graph, about half a microsecond on an H200. Nothing of what is
computed changes. Devices before compute capability 9.0 have no such launch.

A kernel says that it can be launched so by having the constant OVERLAP, which follows the launch option ``launch_pdl``.
It must call ``after_predecessor`` before its first load or store, a prefetch included, and before its first branch, in
every program: were all of them to end without having waited, what comes behind would begin before what came ahead ends.

Source: CUDA C++ Programming Guide, section on programmatic dependent launch; PTX ISA, ``griddepcontrol``.
"""

import triton
import triton.language as tl


@triton.jit
def after_predecessor(OVERLAP: tl.constexpr):
    """Wait until what was launched before has ended, then let what comes behind begin; nothing without OVERLAP."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
