"""Faults to be planted: small wrappers, each one kind of mistake that kernels, caches and converters make."""
