"""Architectures of today, made small, and the parts of them whose degree the book asks for."""
