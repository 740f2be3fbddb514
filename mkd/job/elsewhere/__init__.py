"""Teachers of a job whose model runs in another process: found, tested, and fitted to the flags."""
