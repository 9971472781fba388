"""`liger-kernel verify` and `liger_kernel.verify`: does a patched model still compute what it did?

The files, in the order a run meets them:

    command   arguments of the command line
    verify    the order of things
    state     a model is left as it was found
    outputs   each swapped module and function, on the inputs that the model gave the original
    choices   one routing of tokens to experts for all
    steps     loss and gradients of a training step, its time and memory
    culprit   which kernel it was
    result    how far apart is too far; the table
"""
