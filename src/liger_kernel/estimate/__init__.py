"""`liger-kernel estimate`: the peak memory of a training step, from a configuration alone.

step.py     one step on the meta device, every storage counted
fit.py      the largest batch and sequence that fit
command.py  arguments and the table
"""
