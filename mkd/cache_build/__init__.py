"""The job that fills a teacher cache, and the tools that inspect one."""
