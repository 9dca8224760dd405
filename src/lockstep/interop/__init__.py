"""Other tools' configs and checkpoints, read and converted to Lockstep's."""
