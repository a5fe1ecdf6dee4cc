"""Mutation testing: change one line of the package at a time and see whether a test fails (a development script).

``python -m tests.mutants --seed 0 --count 60`` prints the mutants that no guarding test noticed.
"""
