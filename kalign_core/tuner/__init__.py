"""Finding the best launch of a kernel for a problem; ``loop.tune`` reads top to bottom."""
