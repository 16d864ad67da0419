"""Native CPU kernels: C++ in csrc/, built at first use and called through ctypes.

Open ops.py first: the operators of `Kernels`. forward.py runs a whole decoder pass in one call,
rounds.py a whole speculative round, trees.py greedy draft trees; sampling.py, quantised.py and
delta.py have the other operators. build.py compiles and checks the library, cpu.py asks the machine
what it can do, and tuning.py times kernels that have the same bits.
"""
