"""kalign for AMD devices: a plugin of ``kalign_core``, which knows no vendor.

Five modules, the same as in ``kalign_cuda``, so that a diff of the two folders lists the differences of the vendors.
Nothing here has run on AMD hardware: identity and state come from fakes in the tests, candidates from compiling without
a device.
"""
