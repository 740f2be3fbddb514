"""The plan of a job: a summary that is printed before it trains."""
