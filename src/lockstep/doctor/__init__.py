"""Finds what is wrong with a machine, with the links between ranks, and with a run that failed.

lockstep doctor              checks.CHECKS, side by side         --> findings, what is wrong first
lockstep doctor --ranks N    collectives between N ranks         --> values, latency, bandwidth, the slow link
lockstep doctor RUN          logs, events, metrics, environment  --> what happened, with evidence
"""
