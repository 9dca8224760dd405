"""Monitors of a run: the terminal, metrics.jsonl, TensorBoard, and the run folder that they write to.

reports                                --> Monitors --> terminal, files, TensorBoard, trackers, a user's monitors
user code: log.mean(...) --> MetricLog --> merged over ranks --> the same monitors
"""
