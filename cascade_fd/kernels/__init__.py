"""Triton kernels and their launchers: the only package that imports triton. Launchers allocate nothing."""
