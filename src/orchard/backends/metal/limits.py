"""What a launch may take on an Apple GPU through torch, by Apple's table of limits."""

BUFFERS = 31  # arguments
GROUP_THREADS = 1024  # of a threadgroup
INLINE_BYTES = 4096  # of an argument that is no tensor
THREADGROUP_BYTES = 32768  # of memory that the threads of a group share
