"""Other tools' configs and checkpoints, read and converted to Lockstep's.

foreign          a config of another tool, as keys with values
keys             the meaning of each key: the rows of keys.md
rules            how a row converts a value (also strategy_rules)
answers          what becomes of one key
importing        all keys of a file together, checked
hints            the same rows in error messages about unknown keys
peers, runs      other programs' checkpoints, as weights or as the start of a run
zero_checkpoint  a checkpoint of DeepSpeed, as whole tensors
"""
