"""Native CPU kernels: C++ in csrc/, built at first use and called through ctypes.

Open ops.py first: the operators of `Kernels`. forward.py runs a whole decoder pass in one call,
rounds.py a whole speculative round, trees.py greedy draft trees; quantised.py and grouped.py have
linears over integers, sampling.py and delta.py other operators, ranks.py the memory that the
processes of a tensor-parallel model share. build.py compiles and checks the
library, cpu.py asks the machine what it can do, and tuning.py times kernels of the same bits.
"""
