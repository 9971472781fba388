"""One file an op, each with a list `ROWS` of `liger_kernel.testing.properties.Case`."""
