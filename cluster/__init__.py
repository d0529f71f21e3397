"""Silo cluster mode: a silo's devices train one model as one client of the federation."""
