"""What is written in C for the CPU: products with weights that never change, and attention over the blocks of the
cache."""
