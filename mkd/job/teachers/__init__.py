"""The teachers of a job before they are built: found, checked, and fitted to the flags.

from_flags.py         which of the others the flags name
interface.py          `TeacherSpec`, a teacher that fits the job
model.py              a model that runs beside the student
ensemble.py           several teachers
cached.py             a cache
served.py             a service, `mkd serve-teacher`
inference.py          vLLM or SGLang
inference_states.py   vLLM, by hidden states
common.py             parts of those whose model does not run on the student's ranks
"""
