"""Native CPU kernels: C++ in csrc/, built at first use and called through ctypes.

Open ops.py first: it has the operators of `Kernels`, also over integers. forward.py runs a whole
decoder pass in one call, rounds.py a whole speculative round, with look-ups. sampling.py has
sampling and draft trees, layers.py parts of layers, and ranks.py the memory that the processes of a
tensor-parallel model share. build.py compiles and checks the library, cpu.py reads the machine's
features, and tuning.py times kernels.
"""
