"""`liger-kernel train`: the same fine-tuning twice, plain and patched, and what the patch changed.

The files, in the order a run meets them:

    command    arguments, the order of things
    settings   every choice of a run, with defaults that follow the machine
    model      what --model means, how it is built
    text       what --text means
    tokens     text to blocks of token ids
    worker     one run, in its own process
    parallel   several of them under torchrun: DDP, FSDP2
    process    that process, seen from its parent
    memory     peak memory above a baseline
    compare    do two loss curves agree
    report     report.json and the table
    plot       the picture
"""


class UsageError(Exception):
    """Something the user can put right; its text is the one line they see."""
