"""Looks at runs while they train, and at folders of runs. Nothing is written, and torch is not needed.

files      ends and samples of files that grow       states   what a run does: running, stopped, failed, ...
listing    `lockstep ls`                               watched, screen, terminal   `lockstep top`
"""
