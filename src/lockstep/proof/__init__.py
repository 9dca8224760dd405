"""Whether every strategy is the single process: run, compared, and at a difference explained.

cases        which runs there are, and the config of each
conducting   starts ranks, runs the reference and then all others, and outlives those that fail
trial        one run on one rank, recorded or compared as it goes
evidence     what was seen at each step
tolerances   how much may differ, and why
reasons      what a difference is likely to come from
rows         what is told: a row a run
"""
