"""Which models of the installed transformers are served, and by what: `liger-kernel models`.

families.py   the model classes there are
shrink.py     a config of any of them, made tiny
build.py      a tiny model, its inputs, one training step beside the unpatched model
matrix.py     verdicts per model and seam, from the patcher's own report
fleet.py      one process per model
command.py    the command; page.py: what it prints and writes
"""
