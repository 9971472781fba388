"""`liger-kernel tune`: measure the schedules of `ops._schedules` on this card and write them down.

command    arguments, progress, the file
subjects   what is run for a table, at which sizes
search     which entry is right and fastest
clock      how long a call takes
"""
