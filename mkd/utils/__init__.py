"""Helpers that each folder of mkd may import.

atomic_files.py      files and folders that are complete or absent; near_paths.py: names that are like an absent one
json_files.py        bounded reading of JSON; lfs_pointers.py: pointers of git in place of files
mapped_files.py      files that are mapped into memory
model_folders/       folders of models and tokenizers
limits.py            time and memory for code that may not end
host_memory.py       free memory of the machine
logging.py           the logger; progress.py: how much of long work is done
parent_process.py    processes that end with their parent; stop_signals.py: the signals that end a job
encoding.py          the bytes of a command line
collector.py         imports without garbage collection
missing_packages.py  the error of a package that is not installed
commit.py            the commit of mkd's code
"""
