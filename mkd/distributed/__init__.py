"""Process groups, context-parallel slicing, and the rank's environment variables."""
