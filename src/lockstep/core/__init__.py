"""Words everybody speaks: failures, progress, keys, records, and the sockets between the rooms."""
