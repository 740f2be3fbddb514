"""The job that fills a teacher cache, and tools that inspect, merge and import caches."""
