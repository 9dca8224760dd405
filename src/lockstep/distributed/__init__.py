"""Live processes that can agree: joining, the only raw collectives, the vote, and keyed generators."""
