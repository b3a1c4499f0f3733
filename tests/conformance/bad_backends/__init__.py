"""Backends that look right and are wrong, each in one way that a real one could be; the suites have to say which."""
