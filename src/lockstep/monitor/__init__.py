"""Who looks on: the terminal, metrics.jsonl, TensorBoard, and the run folder they write to.

    report ---> Monitors --+--> Console        what a person sees now
    (every step, <= 1 us)  +--> EventLog       metrics.jsonl, for programs
                           +--> TensorBoard    curves, for eyes
                           +--> a user's own
    user code: log.mean(...) ---> MetricLog, on every rank ---> merged ---> the same watchers

Nothing in here reaches into the loop; a watcher that fails is dropped and the run goes on.
"""
