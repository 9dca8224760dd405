"""Plants random faults in a run, and proves that it ends like the undisturbed one."""
