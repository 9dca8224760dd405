"""Nothing lost: judging updates, hearing signals."""
