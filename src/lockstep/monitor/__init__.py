"""Monitors of a run: the terminal, metrics.jsonl, TensorBoard, and the run folder that they write to.

    report ---> Monitors --+--> Console        the terminal
    (every step, <= 1 us)  +--> EventLog       metrics.jsonl, for programs
                           +--> TensorBoard    curves
                           +--> a user's monitors
    user code: log.mean(...) ---> MetricLog, on every rank ---> merged ---> the same monitors

No monitor can change the training; one that fails is removed, and the run continues.
"""
