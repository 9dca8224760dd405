"""Looks at runs while they train, and at folders of runs. Nothing is written, and torch is not needed.

states   what a run does, from its files: running, stopped, failed, ...
listing  `lockstep ls`                               watched, screen   `lockstep top`
"""
