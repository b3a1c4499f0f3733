"""The command line. The only package that prints: data on standard output, progress on standard error."""
