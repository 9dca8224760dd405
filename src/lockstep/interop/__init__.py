"""Other tools' configs and checkpoints: read, and made into Lockstep's.

foreign      a config of another tool, key by key
keys         what each key of theirs means here: the rows of keys.md
rules        how a row is applied to a value
importing    all keys of a file together, checked
hints        the same rows in error messages about unknown keys
weights      other programs' weights, and runs that DeepSpeed began
"""
