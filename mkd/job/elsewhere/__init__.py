"""Teachers of a job whose model runs in another process, and servers that write its student's texts: found, tested, and
fitted to the flags."""
