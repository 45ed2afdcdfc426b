"""C code for the CPU: products with weights that never change, and attention over the blocks of the cache."""
