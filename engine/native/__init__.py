"""CPU kernels in C++: compiled once per machine, loaded with ctypes. `src/` has the sources."""
