"""Cached targets: a folder of records that a teacher computed before the training, and the teacher that reads it.

record_format.py   the bytes of one token, with bits.py
meta.py            `CacheMeta`: meta.json, the properties of all records
shard.py           `CacheShard`: a file with the records of many segments
store.py           `TeacherStore`: the folder, opened for reading; also the `TeacherSource` of a cached teacher
writer.py          `StoreWriter`: adds segments to a folder
lookup.py          `Lookup`: finds the segments of a microbatch in a store, and the records that a rank reads
reader.py          `CacheReader`: reads these records, and converts them to a `TopKSignal`
teacher.py         `CachedTeacher`: the `Teacher`; prefetches, raises on all ranks alike, broadcasts
"""
