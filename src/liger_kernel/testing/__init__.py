"""What the tests of this project are made of, importable by others: one tolerance policy,
properties every op keeps.
"""
